"""The published command: trained, killed while saving, resumed, resharded, evaluated, asked."""

import functools
import os
import signal
import subprocess
import time

import pytest
from commands import forked, launched, meta_command, perplexity
from helpers.commands import ROOT, environment, logged, run
from helpers.sets import names_in, set_names

from fairseq_tutel.checkpoint import load_for_rank

pytestmark = pytest.mark.long


def evaluate(start, data_bin, path, ranks, *extra):
    """start: runs a program of fairseq's on some ranks."""
    words = f"""{data_bin} --user-dir fairseq_tutel --path {path} --gen-subset test --cpu --is-moe
        --tokens-per-sample 64 --required-batch-size-multiple 1 --model-overrides""".split()
    overrides = "{'moe_eval_capacity_token_fraction': None}"
    return perplexity(start(ranks, "fairseq-eval-lm", *words, overrides, *extra))


def kill_while_saving(command, save_dir):
    """SIGKILL all of a training run before a save's last step; names of its files and the set's."""
    slow = os.pathsep.join([str(ROOT / "tests/e2e/slow_rename"), str(ROOT)])
    how = {"cwd": ROOT, "env": environment(PYTHONPATH=slow), "start_new_session": True}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = subprocess.Popen(command, **how, **silent)
    try:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and job.poll() is None:
            names = os.listdir(save_dir) if save_dir.exists() else []
            if len([n for n in names if n.startswith("checkpoint_last.pt.")]) > 4:
                break
            time.sleep(0.005)
        else:
            pytest.fail(f"no save was caught under way (exit code {job.poll()})")
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return [name for name in os.listdir(save_dir) if name.startswith("checkpoint_last.pt.")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_kill_resume_reshard_evaluate_generate(data_bin, programs, tmp_path):
    """The first commands as a user starts them, later ones of the same kind forked."""
    fork = functools.partial(forked, programs)
    save_dir = tmp_path / "run"
    always = ("--max-update", "40", "--save-interval-updates", "1", "--keep-interval-updates", "1")
    words = meta_command(data_bin, save_dir, *always)
    leftovers = kill_while_saving(launched(2, "fairseq-train", *words), save_dir)
    assert len(leftovers) > 3, "the job was killed after the save, not in it"

    # what is there is one complete set of one update, whichever
    path = save_dir / "checkpoint_last.pt"
    states = [load_for_rank(str(path), rank=r, world_size=2) for r in range(2)]
    updates = {s["optimizer_history"][-1]["num_updates"] for s in states}
    assert len(updates) == 1
    killed_at = updates.pop()

    words = meta_command(data_bin, save_dir, "--max-update", str(killed_at + 3))
    log = run(launched(2, "fairseq-train", *words))
    assert f"@ {killed_at} updates" in log
    records = logged(log, "train_inner")
    assert [int(r["num_updates"]) for r in records] == [killed_at + i for i in (1, 2, 3)]
    last = [name for name in names_in(save_dir) if name.startswith("checkpoint_last")]
    assert {*last} == set_names("checkpoint_last", 2)

    reference = evaluate(fork, data_bin, path, 2, "--batch-size", "4")
    assert 10 < reference < 1200
    tool = functools.partial(fork, 1, "-m", "fairseq_tutel.checkpoint")
    for ranks in (4, 1):
        resharded = tmp_path / f"on{ranks}" / "checkpoint_last.pt"
        tool("reshard", str(path), str(resharded), "--ranks", str(ranks))
        assert evaluate(fork, data_bin, resharded, ranks, "--batch-size", "3") == pytest.approx(
            reference, rel=1e-3
        )
        words = meta_command(data_bin, resharded.parent, "--max-update", str(killed_at + 4))
        log = fork(ranks, "fairseq-train", *words)
        assert [int(r["num_updates"]) for r in logged(log, "train_inner")] == [killed_at + 4]
    merged = tmp_path / "model.pt"
    tool("merge", str(path), str(merged))
    on_merged = evaluate(fork, data_bin, merged, 1, "--batch-size", "1")
    assert on_merged == pytest.approx(reference, rel=1e-3)

    ask = ["fairseq-interactive", str(data_bin), "--user-dir", "fairseq_tutel", "--cpu"]
    ask += ["--task", "language_modeling", "--path", str(path), "--max-len-b", "12"]
    for how in (["--beam", "3"], ["--sampling", "--sampling-topk", "5", "--beam", "1"]):
        answer = programs.run([*ask, *how], text="the value of\n")
        assert answer.status == 0, answer.text[-3000:]
        completion = [line for line in answer.text.splitlines() if line.startswith("H-0")][0]
        assert completion.split("\t")[2].startswith("the value of")
