"""torchrun on a CPU without the launcher: one job, or one clear refusal; never two models."""

import re
import socket

from commands import BIN, forked, train_words
from helpers.commands import run


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(program, *args):
    """The command itself, for a process of its own."""
    ranks = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    return [str(BIN / "torchrun"), *ranks, str(BIN / program), *args]


def workers(programs, program, *args, expect=0):
    """Output of two processes with what torchrun gives to its own, forked."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "LOCAL_WORLD_SIZE": "2"}
    env["TORCHELASTIC_RUN_ID"] = "none"
    return forked(programs, 2, program, *args, expect=expect, launched=False, **env)


def test_torchrun_makes_one_job_of_its_processes(data_bin, programs, tmp_path):
    common = ("--tokens-per-sample", "32")
    command = train_words(data_bin, tmp_path, *common, "--batch-size", "3", "--max-update", "2")
    output = run(torchrun("fairseq-train", *command, "--disable-validation"))
    # one log line per update, of both ranks' batches; one set, with the experts of both
    assert re.findall(r'"bsz": "([\d.]+)"', output) == ["6", "6"]
    names = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert names == [f"checkpoint_last-{part}.pt" for part in ("rank-0", "rank-1", "shared")]

    path = tmp_path / "checkpoint_last.pt"
    subset = ("--path", str(path), "--gen-subset", "test", "--batch-size", "4", *common)
    words = (str(data_bin), "--user-dir", "fairseq_tutel", *subset)
    output = workers(programs, "fairseq-eval-lm", *words)
    text = (data_bin.parent / "test.txt").read_text()
    tokens = len(text.split()) + text.count("\n")  # and an end of sentence each
    assert re.findall(r"All 2 ranks together evaluated ([\d,]+)", output) == [f"{tokens:,}"]
    assert output.count("Perplexity") == 1


def test_hydra_under_torchrun_is_refused_with_the_command_that_works(programs, tmp_path):
    config = ["--config-dir", "configs", "--config-name", "tiny_cpu"]
    overrides = [f"checkpoint.save_dir={tmp_path}/save", f"hydra.run.dir={tmp_path}"]
    output = workers(programs, "fairseq-hydra-train", *config, *overrides, expect=1)
    command = f"fairseq-hydra-train {' '.join([*config, *overrides])}"
    assert f"torchrun [its options] -m fairseq_tutel.launch -- {command}" in output
    assert not list((tmp_path / "save").glob("*"))
