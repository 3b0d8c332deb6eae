"""What programs report as perplexity, against a loop over the text that uses none of them."""

import math

import pytest
import torch
from commands import forked, logged, perplexity
from fairseq.data import Dictionary

from fairseq_tutel.models import TransformerLMGPTMoE

BLOCK = 32


@pytest.fixture(scope="module")
def trained(data_bin, tmp_path_factory, programs):
    """(path of a set, log of its training): 2 ranks, validated after the last update."""
    save_dir = tmp_path_factory.mktemp("perplexity")
    log = forked(
        programs,
        2,
        "fairseq-train",
        str(data_bin),
        *("--user-dir", "fairseq_tutel", "--cpu", "--task", "language_modeling"),
        *("--arch", "transformer_lm_gpt_moe", "--criterion", "moe_cross_entropy"),
        *("--decoder-layers", "2", "--decoder-embed-dim", "32", "--moe-expert-count", "4"),
        *("--decoder-ffn-embed-dim", "64", "--decoder-attention-heads", "4"),
        *("--tokens-per-sample", str(BLOCK), "--batch-size", "8", "--batch-size-valid", "5"),
        *("--optimizer", "adam", "--lr", "0.01", "--max-update", "30", "--num-workers", "0"),
        # evaluated at other numbers of ranks below
        *("--moe-expert-parallel-size", "2", "--moe-shared-expert-ffn-dim", "16"),
        *("--moe-null-experts", "2", "--moe-eom", "0.1", "--moe-fom", "0.1"),
        *("--moe-gate-loss-wt", "0", "--log-format", "json", "--save-dir", str(save_dir)),
        "--no-epoch-checkpoints",
    )
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


@pytest.mark.parametrize("ranks, given, size", [(1, [], BLOCK), (2, [], BLOCK), (1, ["16"], 16)])
def test_eval_lm_scores_every_token(data_bin, trained, reference, programs, ranks, given, size):
    """By default in blocks of the size that the model was trained on."""
    command = [*options(data_bin, trained[0]), "--gen-subset", "test", "--batch-size", "3"]
    command += ["--tokens-per-sample", *given] if given else []
    output = forked(programs, ranks, "fairseq-eval-lm", *command)
    loss, tokens = reference("test", size)
    assert f"valuated {tokens:,} tokens" in output  # Evaluated, or All 2 ranks together evaluated
    assert perplexity(output) == pytest.approx(2**loss, rel=1e-4)
    assert ("blocks of 32 tokens, as in training" in output) == (not given)


def test_blocks_that_do_not_fit_are_an_error(data_bin, trained, programs):
    command = [*options(data_bin, trained[0]), "--gen-subset", "test"]
    output = forked(programs, 2, "fairseq-eval-lm", *command, "--tokens-per-sample", "64", expect=1)
    assert "blocks are longer than the 32 positions of the model (up to 64 tokens)" in output
    assert "give --tokens-per-sample 32 or less" in output
    assert "Traceback" not in output and output.count("error") == 2


def test_validation_in_training_is_of_every_block(trained, reference):
    loss, _ = reference("valid", BLOCK)
    reported = float(logged(trained[1], "valid")[-1]["valid_inner_loss"])
    assert reported == pytest.approx(loss, abs=2e-3)


def test_validate_is_of_every_block(data_bin, trained, reference, programs):
    command = [*options(data_bin, trained[0]), "--task", "language_modeling", "--batch-size", "5"]
    command += ["--valid-subset", "test", "--log-format", "json"]
    output = forked(programs, 1, "fairseq-validate", *command)
    loss, _ = reference("test", BLOCK)
    assert float(logged(output, "test")[-1]["test_inner_loss"]) == pytest.approx(loss, abs=2e-3)
