"""Other real commands: Hydra, fairseq-generate, fairseq-validate, the hub, bad options."""

import os
import re
import shutil
import sys

import pytest
import torch
from commands import forked, launched, logged, perplexity, run

TINY = ["--config-dir", "configs", "--config-name", "tiny_cpu"]


@pytest.fixture(scope="module")
def trained(data_bin, tmp_path_factory, programs):
    """Path of a set saved by two ranks that trained on sentences of different lengths."""
    save_dir = tmp_path_factory.mktemp("trained")
    log = forked(
        programs,
        2,
        "fairseq-train",
        str(data_bin),
        *("--user-dir", "fairseq_tutel", "--cpu", "--task", "language_modeling"),
        *("--arch", "transformer_lm_gpt_moe", "--criterion", "moe_cross_entropy"),
        *("--decoder-layers", "2", "--decoder-embed-dim", "32", "--moe-expert-count", "4"),
        *("--decoder-ffn-embed-dim", "64", "--decoder-attention-heads", "4"),
        *("--share-decoder-input-output-embed", "--moe-gate-loss-wt", "0.01"),
        *("--tokens-per-sample", "64", "--sample-break-mode", "eos", "--max-tokens", "512"),
        *("--required-batch-size-multiple", "1", "--optimizer", "adam", "--lr", "0.003"),
        *("--max-update", "20", "--validate-interval-updates", "10", "--num-workers", "0"),
        *("--moe-load-log-interval", "10", "--log-format", "json", "--log-interval", "5"),
        *("--save-dir", str(save_dir), "--no-epoch-checkpoints"),
    )
    losses = [float(r["valid_loss"]) for r in logged(log, "valid")]
    assert losses[-1] < losses[0]
    assert (save_dir / "expert_load.jsonl").read_text().count("\n") == 2
    return save_dir / "checkpoint_best.pt"


def options(data_bin, path):
    return [str(data_bin), "--user-dir", "fairseq_tutel", "--path", str(path), "--cpu"]


def test_perplexity_does_not_depend_on_ranks_or_batches(data_bin, trained, programs):
    values, tokens = [], set()
    for ranks, batch in ((1, "1"), (1, "16"), (2, "5"), (4, "2")):
        sentences = ["--sample-break-mode", "eos", "--tokens-per-sample", "64"]
        command = [*options(data_bin, trained), "--gen-subset", "test", "--batch-size", batch]
        log = forked(programs, ranks, "fairseq-eval-lm", *command, *sentences)
        values.append(perplexity(log))
        line = "together evaluated" if ranks > 1 else "Evaluated"
        tokens.add(re.search(rf"{line} ([\d,]+) tokens", log)[1])
    assert len(tokens) == 1  # all of them, on any number of ranks
    assert values == pytest.approx([values[0]] * len(values), rel=1e-4)


def test_misspelt_overrides_are_an_error(data_bin, trained, programs):
    command = [*options(data_bin, trained), "--gen-subset", "test", "--tokens-per-sample", "64"]
    command += ["--model-overrides", "{'moe_eval_capacty_factor': 1.0}"]
    output = forked(programs, 1, "fairseq-eval-lm", *command, expect=1)
    assert "moe_eval_capacty_factor: there is no such option; did you mean moe_eval_cap" in output


class RunsCode:
    """Unpickling this would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("member", ["", "-rank-1"], ids=["single-file", "member-of-a-set"])
def test_a_file_that_runs_code_is_refused_in_one_line(
    member, data_bin, trained, programs, tmp_path
):
    """Where torch was set to read anything, as many do for fairseq since torch 2.6."""
    if member:
        for file in trained.parent.glob("checkpoint_best-*.pt"):
            shutil.copy(file, tmp_path)
    file = tmp_path / f"checkpoint_best{member}.pt"
    torch.save({"model": {}, "x": RunsCode(tmp_path / "ran")}, file)
    command = [*options(data_bin, tmp_path / "checkpoint_best.pt"), "--gen-subset", "test"]
    unsafe = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    output = forked(programs, 1, "fairseq-eval-lm", *command, expect=1, **unsafe)
    refusals = [line for line in output.splitlines() if "refusing to load" in line]
    assert len(refusals) == 1 and f"{file}: holds posix.system" in refusals[0]
    assert "Traceback" not in output and "weights_only" not in output
    assert not (tmp_path / "ran").exists()


def test_generate_with_beam_and_sampling(data_bin, trained, programs):
    command = [*options(data_bin, trained), "--gen-subset", "test", "--is-moe"]
    command += ["--task", "language_modeling", "--sample-break-mode", "eos"]
    command += ["--tokens-per-sample", "64", "--batch-size", "8", "--prefix-size", "3"]
    command += ["--required-batch-size-multiple", "1"]
    for how in (["--beam", "2"], ["--sampling", "--beam", "1"]):
        output = forked(programs, 1, "fairseq-generate", *command, *how, "--max-len-b", "10")
        hypotheses = [line for line in output.splitlines() if line.startswith("H-")]
        assert len(hypotheses) == 60
        # a prefix of the reference is kept
        target = {
            line.split("\t")[0][2:]: line.split("\t")[1].replace("<<unk>>", "<unk>").split()[:2]
            for line in output.splitlines()
            if line.startswith("T-")
        }
        for line in hypotheses:
            number, _, text = line.split("\t")
            assert text.split()[:2] == target[number[2:]]


def test_validate_runs_on_one_process_and_refuses_two(data_bin, trained, programs):
    command = [*options(data_bin, trained), "--task", "language_modeling"]
    command += ["--valid-subset", "test", "--batch-size", "8"]
    output = forked(programs, 1, "fairseq-validate", *command)
    assert "moe_gate_loss" in output
    output = forked(programs, 2, "fairseq-validate", *command, expect=1)
    assert "runs a model with experts on one process, not on 2" in output


def test_from_pretrained(data_bin, trained):
    program = (
        "import sys\n"
        "from fairseq_tutel.models import TransformerLMGPTMoE\n"
        "folder, data = sys.argv[1:]\n"
        # as documented for fairseq's moe branch, and from a script that has imported the package
        "old = dict(is_moe=True, moe_disable_padding=True, skip_prepare_for_inference=True)\n"
        "old['user_dir'] = 'fairseq_tutel'\n"
        "lm = TransformerLMGPTMoE.from_pretrained(folder, 'checkpoint_best.pt', data, **old)\n"
        "print('SAMPLE', lm.sample('the value of', beam=2, max_len_b=8))\n"
        "scores = lm.score('the value of the')['positional_scores']\n"
        "print('SCORES', len(scores), bool((scores < 0).all()))\n"
    )
    output = run([sys.executable, "-c", program, str(trained.parent), str(data_bin)])
    assert "SAMPLE the value of" in output
    assert "SCORES 4 True" in output


def test_hydra_on_one_and_two_ranks(tmp_path):
    losses = []
    for ranks in (1, 2):
        save_dir = tmp_path / f"on{ranks}"
        overrides = [f"checkpoint.save_dir={save_dir}", f"hydra.run.dir={tmp_path}/hydra{ranks}"]
        # the same 4 sequences per update, and no drops, which depend on how they are shared out
        overrides += ["optimization.max_update=6", f"dataset.batch_size={4 // ranks}"]
        overrides += ["model.dropout=0", "model.attention_dropout=0", "common.log_interval=1"]
        # nor the balance loss, a mean over what each rank has
        overrides += ["+model.moe_capacity_factor=0", "criterion.moe_gate_loss_wt=0"]
        output = run(launched(ranks, "fairseq-hydra-train", *TINY, *overrides))
        records = logged(output, "train_inner")
        losses.append([float(r["inner_loss"]) for r in records])
        assert len(records) == 6
        assert (save_dir / f"checkpoint_last-rank-{ranks - 1}.pt").exists()
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0][-1] < losses[0][0] - 0.1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["--moe-top1-expert", "--moe-top-k", "2"], "--moe-top1-expert and --moe-top-k 2"),
        (
            ["--moe-eval-capacity-factor", "1", "--moe-eval-capacity-token-fraction", "0.5"],
            "--moe-eval-capacity-token-fraction 0.5 and --moe-eval-capacity-factor 1.0",
        ),
        (
            ["--moe-gate-noise", "nan", "--moe-z-loss-wt", "nan", "--moe-load-log-interval", "-1"],
            "error: --moe-gate-noise nan must be a finite number; --moe-z-loss-wt nan must be a "
            "finite number; --moe-load-log-interval -1 must be at least 0\n",
        ),
        (["--moe-freq", "9"], "--moe-freq 9 makes no MoE layer among 2 layers"),
        (["--moe-expert-count", "3"], "3 experts cannot be spread over 2 ranks"),
        (["--restore-file", "nowhere/x.pt"], "nowhere/x"),
        (["--amp"], "--amp is not supported"),
    ],
)
def test_bad_options_end_with_one_clear_message(programs, tmp_path, bad, message):
    output = forked(
        programs,
        2,
        "fairseq-train",
        *("--user-dir", "fairseq_tutel", "--cpu", "--task", "dummy_lm", "--dict-size", "96"),
        *("--tokens-per-sample", "16", "--batch-size", "2", "--optimizer", "adam"),
        *("--arch", "transformer_lm_gpt_moe", "--criterion", "moe_cross_entropy"),
        *("--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-attention-heads"),
        *("2", "--max-update", "1", "--disable-validation", "--save-dir", str(tmp_path), *bad),
        expect=1,
    )
    assert message in output


def test_hydra_refuses_what_the_command_line_refuses(programs, tmp_path):
    overrides = ["+model.moe_gate_noise=nan", f"hydra.run.dir={tmp_path}"]
    overrides += [f"checkpoint.save_dir={tmp_path}/save"]
    output = forked(programs, 1, "fairseq-hydra-train", *TINY, *overrides, expect=1)
    assert "--moe-gate-noise nan must be a finite number" in output
    assert not list((tmp_path / "save").glob("*"))
