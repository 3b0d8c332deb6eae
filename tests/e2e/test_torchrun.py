"""torchrun on a CPU without the launcher: one job, or one clear refusal; never two models."""

import re
import socket

from commands import BIN, run


def torchrun(program, *args):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    return [str(BIN / "torchrun"), *ranks, str(BIN / program), *args]


def test_torchrun_makes_one_job_of_its_processes(data_bin, tmp_path):
    common = (str(data_bin), "--user-dir", "fairseq_tutel", "--tokens-per-sample", "32")
    output = run(
        torchrun(
            "fairseq-train",
            *common,
            *("--task", "language_modeling", "--arch", "transformer_lm_gpt_moe"),
            *("--criterion", "moe_cross_entropy", "--decoder-layers", "2", "--decoder-embed-dim"),
            *("16", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2"),
            *("--moe-expert-count", "4", "--batch-size", "3", "--required-batch-size-multiple"),
            *("1", "--optimizer", "adam", "--max-update", "2", "--disable-validation"),
            *("--num-workers", "0", "--log-format", "json", "--log-interval", "1"),
            *("--no-epoch-checkpoints", "--save-dir", str(tmp_path)),
        )
    )
    # one log line per update, of both ranks' batches; one set, with the experts of both
    assert re.findall(r'"bsz": "([\d.]+)"', output) == ["6", "6"]
    names = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert names == [f"checkpoint_last-{part}.pt" for part in ("rank-0", "rank-1", "shared")]

    path = tmp_path / "checkpoint_last.pt"
    subset = ("--path", str(path), "--gen-subset", "test", "--batch-size", "4")
    output = run(torchrun("fairseq-eval-lm", *common, *subset))
    text = (data_bin.parent / "test.txt").read_text()
    tokens = len(text.split()) + text.count("\n")  # and an end of sentence each
    assert re.findall(r"All 2 ranks together evaluated ([\d,]+)", output) == [f"{tokens:,}"]
    assert output.count("Perplexity") == 1


def test_hydra_under_torchrun_is_refused_with_the_command_that_works(tmp_path):
    config = ["--config-dir", "configs", "--config-name", "tiny_cpu"]
    overrides = [f"checkpoint.save_dir={tmp_path}/save", f"hydra.run.dir={tmp_path}"]
    output = run(torchrun("fairseq-hydra-train", *config, *overrides), expect=1)
    command = f"fairseq-hydra-train {' '.join([*config, *overrides])}"
    assert f"torchrun --nproc-per-node 2 -m fairseq_tutel.launch -- {command}" in output
    assert not list((tmp_path / "save").glob("*"))
