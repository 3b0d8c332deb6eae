"""Tiny models of fairseq with every option that an export has a place for, saved as sets."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import torch
from helpers.sets import member
from helpers.training import VOCABULARY, make_config, make_trainer, save
from helpers.translation import make_pairs, pair_config

EXPERTS = "--moe-expert-count 4 "
# what transformers' NllbMoe has a place for
NLLB = EXPERTS + "--encoder-normalize-before --decoder-normalize-before "
NLLB_CASES = {
    "as NLLB": "",
    "other sizes of the sides, one sparse":
        "--encoder-layers 3 --decoder-layers 1 --encoder-moe-freq 3 --decoder-ffn-embed-dim 20 "
        "--decoder-attention-heads 4 --activation-fn gelu --no-scale-embedding "
        "--dropout 0.1 --attention-dropout 0.2 --activation-dropout 0.3",
    "all layers sparse, masks, capacity":
        "--moe-freq 1 --moe-eom 0.2 --moe-batch-prioritized-routing --use-moe-pad-mask "
        "--moe-normalize-gate-prob-before-dropping --moe-gating-use-model-dtype",
}  # fmt: skip
CASES = {
    "top-2, tied, masks, weights as they are":
        "--share-decoder-input-output-embed --moe-eom 0.2 --moe-fom 0.1 --moe-unnormalized-weights",
    "top-1, untied, two experts, load bias, no positions":
        "--moe-expert-count 2 --moe-top-k 1 --moe-load-bias quantile --activation-fn gelu_accurate "
        "--no-token-positional-embeddings",
    "top-3, all layers sparse, relu, shared expert with a gate":
        "--moe-top-k 3 --moe-freq 1 --activation-fn relu --moe-shared-expert-ffn-dim 12 "
        "--moe-shared-expert-gate",
    "swiglu, shared expert, learned positions":
        "--moe-expert-network swiglu --moe-shared-expert-ffn-dim 12 --decoder-learned-pos "
        "--moe-expert-ffn-dim 20 --share-decoder-input-output-embed",
    "geglu with biases, sigmoid, load bias":
        "--moe-expert-network geglu --moe-geglu-bias --moe-score-function sigmoid "
        "--moe-load-bias sign --moe-route-scale 1.5 --no-scale-embedding --no-decoder-final-norm",
    "clamped swiglu with biases, groups, frozen bias":
        "--moe-expert-network clamped_swiglu --moe-clamped-swiglu-bias "
        "--moe-clamped-swiglu-limit 0.5 --moe-expert-count 6 --moe-num-expert-groups 3 "
        "--moe-top-groups 2 --moe-load-bias frozen --moe-score-function sigmoid",
}  # fmt: skip


class Saved(NamedTuple):
    """A set, the folder of its dictionary, and the model in evaluation."""

    path: Path
    data: Path
    model: torch.nn.Module


def make(
    folder: Path, options: str = "", *, scale: float = 3.0, positions: int | None = None
) -> Saved:
    """A model of random weights, larger ones where experts are chosen, so that choices show."""
    config = make_config(*(EXPERTS + options).split())
    if positions:
        config.model.max_target_positions = positions
    task = {key: config.task[key] for key in ("tokens_per_sample", "add_bos_token")}
    return _saved(folder, make_trainer(config), scale, {"_name": "language_modeling", **task})


def make_translation(folder: Path, options: str = "", *, scale: float = 3.0) -> Saved:
    """The same for a translation model of two languages, whose tokens end the dictionary."""
    trainer = make_trainer(pair_config(*(NLLB + options).split()), make_pairs(0))
    task = {"_name": "translation_multi_simple_epoch", "langs": ["de", "en"]}
    saved = _saved(folder, trainer, scale, task)
    symbols = [f"w{number}" for number in range(VOCABULARY - 6)]
    for name in ("dict.de.txt", "dict.en.txt"):
        write_dictionary(folder, symbols, name)
    return saved


def _saved(folder: Path, trainer, scale: float, task: dict) -> Saved:
    model = trainer.get_model()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "moe_layer" in name:
                value.mul_(scale)
            if name.endswith("bias"):
                value.add_(0.1 * torch.randn_like(value))
    path = folder / "checkpoint_last.pt"
    save(trainer, path)
    file = member(path, "shared")  # as if trained on a data-bin there; the task was a dummy
    state = torch.load(file, weights_only=False)
    state["cfg"]["task"] = {"data": str(folder), **task}
    torch.save(state, file)
    return Saved(path, write_dictionary(folder), model.eval())


def write_dictionary(folder: Path, symbols=None, name: str = "dict.txt") -> Path:
    symbols = [f"w{number}" for number in range(VOCABULARY - 4)] if symbols is None else symbols
    lines = [f"{symbol} 1\n" for symbol in symbols]
    (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder


def sentences(rows: int = 3, length: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    tokens[:, 0] = 2
    return tokens


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(src_tokens=tokens, src_lengths=None)[0]


def interactive(programs, saved: Saved, texts: list[str], *words: str):
    """fairseq-interactive's hypotheses of every text, best first: (score in nats, words)."""
    command = [
        "fairseq-interactive", str(saved.data), "--user-dir", "fairseq_tutel", "--cpu",
        "--path", str(saved.path), "--max-len-a", "0", "--buffer-size", "9", *words,
    ]  # fmt: skip
    done = programs.run(command, text="".join(f"{text}\n" for text in texts))
    assert done.status == 0, done.text[-2000:]
    found = [[] for _ in texts]
    for number, score, text in re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", done.stdout, re.MULTILINE):
        found[int(number)].append((float(score) * math.log(2), text))
    return found


def generate(model, inputs, length: int, **options):
    """What ``generate`` returns, ended as fairseq ends texts: at a length of so many symbols the
    only choice is ``</s>``, with the score that it has."""
    return model.generate(
        **inputs,
        max_length=length + 2,
        prefix_allowed_tokens_fn=lambda _, ids: range(VOCABULARY) if len(ids) <= length else [2],
        return_dict_in_generate=True,
        output_scores=True,
        do_sample=False,
        **options,
    )
