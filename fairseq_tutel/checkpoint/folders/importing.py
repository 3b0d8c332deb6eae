"""Convert a folder of transformers to a set, from which training can continue."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...config.options import as_flags
from ..layout import CheckpointError, split_dense_expert, split_key
from ..state import MODEL
from ..store import refuse_target, write_set
from .folder import SPECIAL, Folder
from .options import (
    LANGUAGE_MODEL_DEFAULTS,
    NLLB_DEFAULTS,
    SPECIAL_IDS,
    language_model_options,
    nllb_options,
    read_config,
)
from .tensors import Tensors, language_model_tensors, nllb_tensors

logger = logging.getLogger(__name__)

# names under which some versions of transformers also store a tied embedding
_TIED = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
# number by which fairseq's stacks mark that they end with a norm
_VERSION = 3.0


@dataclass(frozen=True)
class Model:
    """Kind of folder, and the model of fairseq that it becomes."""

    arch: str
    criterion: tuple[str, str]  # its name on the command line, and its class
    task: str
    sides: tuple[str, ...]  # its stacks
    defaults: Mapping[str, Any]  # of config.json
    options: Callable[[Any], dict[str, Any]]  # config -> options of the model
    tensors: Callable[[Any], Tensors]  # config -> tensors of a checkpoint
    embedding: str  # the folder's tensor, which may also have other names there if it is tied


# model_type of config.json -> model
MODELS = {
    "fairseq_moe": Model(
        arch="transformer_lm_gpt_moe",
        criterion=("moe_cross_entropy", "MoECrossEntropyCriterion"),
        task="language_modeling",
        sides=("decoder",),
        defaults=LANGUAGE_MODEL_DEFAULTS,
        options=language_model_options,
        tensors=language_model_tensors,
        embedding="model.embed_tokens.weight",
    ),
    "nllb-moe": Model(
        arch="transformer_moe",
        criterion=("moe_label_smoothed_cross_entropy", "MoELabelSmoothedCrossEntropyCriterion"),
        task="translation_multi_simple_epoch",
        sides=("encoder", "decoder"),
        defaults=NLLB_DEFAULTS,
        options=nllb_options,
        tensors=nllb_tensors,
        embedding="model.shared.weight",
    ),
}


def import_folder(
    folder: str | Path, dst: str, *, ranks: int | None = None, force: bool = False
) -> str:
    """Write a set from a folder of transformers' NllbMoe, or one that ``export`` wrote.

    The flags to continue training with are logged. ``dict.txt``, with the tokenizer's symbols in
    the order of the embedding's rows, is written beside the set unless there is one. Needs memory
    for one file of the set.

    Args:
        folder: with ``config.json`` and safetensors.
        dst: X.pt of the set; the canonical path is returned.
        ranks: W of the set (default None: one).
        force: replace what ``dst`` names.

    Raises:
        CheckpointError: names a field, tensor or missing file that stands in the way.
    """
    refuse_target(dst, None, force)  # before a model is read
    source = Folder(folder)
    kind = source.config.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        known = " or ".join(MODELS)
        raise CheckpointError(f"{folder}: the type {kind!r} cannot be imported, only {known}")
    model = MODELS[kind]
    try:
        config = read_config(source.config, model.defaults)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    for name, number in SPECIAL_IDS.items():
        if (found := getattr(config, name, number)) != number:
            raise CheckpointError(f"{folder}: {name} {found} cannot be imported, only {number}")
    options = model.options(config)
    dense, experts = split_dense_expert(model.tensors(config))
    if not experts:
        raise CheckpointError(f"{folder}: has no experts; dense models are not imported")
    if config.tie_word_embeddings:
        source.join(model.embedding, _TIED)
    _check_tensors(source, {**dense, **experts})

    def read_experts(wanted: range) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        found = {}
        for key, stored in experts.items():
            prefix, number, rest = split_key(key)
            if number in wanted:
                found[f"{prefix}{number - wanted.start}{rest}"] = source.read(*stored)
        return found, {}

    symbols = source.symbols(config.vocab_size)
    state = _state(model, config, options, source)
    distinct = dict.fromkeys(dense.values())  # tied tensors once
    read = {stored: source.read(*stored) for stored in distinct}
    state[MODEL] |= {key: read[stored] for key, stored in dense.items()}
    written = write_set(
        dst, state, read_experts,
        num_experts=config.num_experts, num_ranks=ranks or 1, force=force,
    )  # fmt: skip
    _write_dictionary(symbols, Path(written).with_name("dict.txt"))
    if model.task == "language_modeling":
        options = {**options, "tokens_per_sample": config.max_position_embeddings}
    given = {name: v for name, v in options.items() if v or not name.startswith("moe_")}
    flags = {"arch": model.arch, "criterion": model.criterion[0], **given}
    logger.info("continue training with: %s", as_flags(flags))
    return written


def _check_tensors(source: Folder, tensors: Tensors) -> None:
    """Raise CheckpointError unless the folder has exactly the tensors that the set needs."""
    needed: dict[str, dict[int, tuple[int, ...]]] = {}
    for (name, start), shape in tensors.values():
        needed.setdefault(name, {})[start] = shape
    for name in sorted(needed.keys() - source.names):
        raise CheckpointError(f"{source.path}: lacks {name}")
    for name in sorted(source.names - needed.keys()):
        raise CheckpointError(f"{source.path}: {name} has no place in fairseq's model")
    for name, parts in needed.items():
        found, size = source.shape(name), sum(torch.Size(part).numel() for part in parts.values())
        # experts may be stacked along several dimensions before the last one
        last = parts[0] if len(parts) == 1 else parts[0][1:]
        if found.numel() != size or tuple(found[len(found) - len(last) :]) != last:
            wanted = f"{size} numbers, the last dimensions {list(last)}"
            raise CheckpointError(
                f"{source.path}: {name} has the shape {list(found)}, and by config.json it needs "
                f"{wanted}"
            )


def _state(model: Model, config: Any, options: Mapping[str, Any], source: Folder) -> dict[str, Any]:
    """Return what fairseq stores beside the weights, and the marks of its stacks."""
    criterion, class_name = model.criterion
    task: dict[str, Any] = {"_name": model.task, "data": ""}
    if model.task == "language_modeling":
        task |= {
            "tokens_per_sample": config.max_position_embeddings,
            "max_target_positions": config.max_position_embeddings,
            "add_bos_token": source.generation.get("bos_token_id") == SPECIAL_IDS["bos_token_id"],
        }
    elif languages := source.languages():
        task["langs"] = languages
    marks = {f"{side}.version": torch.tensor([_VERSION]) for side in model.sides}
    history = {
        "criterion_name": class_name,
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    return {
        "args": None,
        "cfg": {
            "_name": None,
            "model": {"_name": model.arch, **options},
            "task": task,
            "criterion": {"_name": criterion},
        },
        MODEL: marks,
        "criterion": None,
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }


def _write_dictionary(symbols: list[str] | None, path: Path) -> None:
    if symbols is None:
        logger.info("no dict.txt: the folder's tokenizer is not a dictionary of fairseq's form")
    elif not path.exists():
        lines = [f"{symbol} 1\n" for symbol in symbols[len(SPECIAL) :]]
        path.write_text("".join(lines), encoding="utf-8")
