"""Other real commands on one trained model: fairseq-eval-lm, -validate, the hub; Hydra.
Their perplexity is held against a loop over the text that uses none of them."""

import json
import math

import pytest
import torch
from commands import forked, perplexity, train_words
from fairseq.data import Dictionary
from helpers.commands import ROOT, logged
from helpers.sets import member

from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE

pytestmark = pytest.mark.long

BLOCK = 64
TINY = ["--config-dir", "configs", "--config-name", "tiny_cpu"]


@pytest.fixture(scope="module")
def trained(data_bin, tmp_path_factory, programs):
    """(path of a set, log of its training): 2 ranks, validated after the last update."""
    save_dir = tmp_path_factory.mktemp("trained")
    words = f"""--share-decoder-input-output-embed --tokens-per-sample {BLOCK} --batch-size 4
        --batch-size-valid 3 --lr 0.01 --max-update 30 --validate-interval-updates 15
        --moe-load-log-interval 15 --moe-expert-parallel-size 2 --moe-shared-expert-ffn-dim 16
        --moe-null-experts 2 --moe-eom 0.1 --moe-fom 0.1 --moe-gate-loss-wt 0"""
    command = train_words(data_bin, save_dir, *words.split())
    log = forked(programs, 2, "fairseq-train", *command)
    losses = [r["loss"] for r in logged(log, "valid")]
    assert losses[-1] < losses[0]
    assert (save_dir / "expert_load.jsonl").read_text().count("\n") == 2
    return save_dir / "checkpoint_last.pt", log


@pytest.fixture(scope="module")
def reference(data_bin, trained):
    """Function (split, block size) -> (loss in bits per token, tokens)."""
    path, _ = trained
    folder, name = str(path.parent), path.name
    lm = TransformerLMGPTMoE.from_pretrained(folder, name, str(data_bin)).models[0]
    dictionary = Dictionary.load(str(data_bin / "dict.txt"))

    def loss_and_tokens(split, size):
        lines = (data_bin.parent / f"{split}.txt").read_text().splitlines()
        words = [word for line in lines for word in (*line.split(), "</s>")]
        target = torch.tensor([dictionary.index(word) for word in words])
        source = torch.cat([torch.tensor([dictionary.eos()]), target[:-1]])
        bits = 0.0
        with torch.no_grad():
            for start in range(0, len(target), size):
                block = slice(start, start + size)
                logits = lm(source[block][None])[0][0].double()
                scores = logits.log_softmax(-1).gather(1, target[block][:, None])
                bits -= float(scores.sum()) / math.log(2)
        return bits / len(target), len(target)

    return loss_and_tokens


def options(data_bin, path):
    return [str(data_bin), "--user-dir", "fairseq_tutel", "--path", str(path), "--cpu"]


# ranks that exchange nothing are summed, too
ALONE = {"moe_expert_parallel_size": 1}


@pytest.mark.parametrize(
    "ranks, given, size", [(1, {}, BLOCK), (4, {}, BLOCK), (1, {}, 16), (2, ALONE, BLOCK)]
)
def test_eval_lm_scores_and_traces_every_token(
    data_bin, trained, reference, programs, ranks, given, size, tmp_path
):
    command = [*options(data_bin, trained[0]), "--gen-subset", "test", "--batch-size", "3"]
    command += ["--tokens-per-sample", str(size), "--model-overrides"]
    given = repr({**given, "moe_trace": str(tmp_path)})
    output = forked(programs, ranks, "fairseq-eval-lm", *command, given)
    loss, tokens = reference("test", size)
    assert traced_tokens(tmp_path) == (ranks, tokens)
    start = "Evaluated" if ranks == 1 else f"All {ranks} ranks together evaluated"
    assert f"{start} {tokens:,} tokens" in output
    assert perplexity(output) == pytest.approx(2**loss, rel=1e-4)


def traced_tokens(folder):
    """Ranks of a trace, and tokens of all; the one sparse layer has two experts of each."""
    lines = [json.loads(text) for file in folder.iterdir() for text in file.open()]
    passes = [each for each in lines if "modes" not in each]
    choices = [pair for each in passes for pair in each["choices"]["1"]]
    assert all(len(pair) == 2 for pair in choices)
    assert len(choices) == sum(len(each["tokens"][""]) for each in passes)
    return len(lines) - len(passes), len(choices)


def test_blocks_that_do_not_fit_are_an_error(data_bin, trained, programs):
    command = [*options(data_bin, trained[0]), "--gen-subset", "test", "--tokens-per-sample", "128"]
    output = forked(programs, 2, "fairseq-eval-lm", *command, expect=1)
    assert "blocks are longer than the 64 positions of the model (up to 128 tokens)" in output
    assert "give --tokens-per-sample 64 or less" in output
    assert "Traceback" not in output and output.count("error") == 2


def test_validation_is_of_every_block(data_bin, trained, reference, programs, tmp_path):
    """In training and by fairseq-validate, whose ranks share the blocks, unevenly here."""
    reported = logged(trained[1], "valid")[-1]["inner_loss"]
    assert reported == pytest.approx(reference("valid", BLOCK)[0], abs=2e-3)
    command = [*options(data_bin, trained[0]), "--task", "language_modeling", "--batch-size", "5"]
    command += ["--valid-subset", "test", "--log-format", "json"]
    found = []
    for ranks in (1, 2):
        trace = ["--model-overrides", repr({"moe_trace": f"{tmp_path}/{ranks}"})]
        rows = logged(forked(programs, ranks, "fairseq-validate", *command, *trace), "test")
        assert traced_tokens(tmp_path / str(ranks)) == (ranks, reference("test", BLOCK)[1])
        (row,) = rows
        assert row["inner_loss"] == pytest.approx(reference("test", BLOCK)[0], abs=2e-3)
        found.append(row)
    for name in ("moe_gate_loss", "entropy_gating", "moe_util_load", "unused_expert1_count"):
        assert len({row[name] for row in found}) == 1, name


def test_from_pretrained(data_bin, trained):
    """With the arguments that fairseq's moe branch documents, where the package is imported."""
    old = {"is_moe": True, "moe_disable_padding": True, "skip_prepare_for_inference": True}
    folder, name = str(trained[0].parent), trained[0].name
    old["user_dir"] = str(ROOT / "fairseq_tutel")
    lm = TransformerLMGPTMoE.from_pretrained(folder, name, str(data_bin), **old)
    assert lm.sample("the value of", beam=2, max_len_b=8).startswith("the value of")
    scores = lm.score("the value of the")["positional_scores"]
    assert len(scores) == 4 and bool((scores < 0).all())


def test_hydra_on_one_and_two_ranks(programs, tmp_path):
    losses = []
    for ranks in (1, 2):
        save_dir = tmp_path / f"on{ranks}"
        overrides = [f"checkpoint.save_dir={save_dir}", f"hydra.run.dir={tmp_path}/hydra{ranks}"]
        # the same 4 sequences per update, and no drops, which depend on how they are shared out
        overrides += ["optimization.max_update=6", f"dataset.batch_size={4 // ranks}"]
        overrides += ["model.dropout=0", "model.attention_dropout=0", "common.log_interval=1"]
        # nor the balance loss, a mean over what each rank has
        overrides += ["+model.moe_capacity_factor=0", "criterion.moe_gate_loss_wt=0"]
        output = forked(programs, ranks, "fairseq-hydra-train", *TINY, *overrides)
        records = logged(output, "train_inner")
        losses.append([r["inner_loss"] for r in records])
        assert len(records) == 6
        assert member(save_dir / "checkpoint_last.pt", f"rank-{ranks - 1}")
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0][-1] < losses[0][0] - 0.1
