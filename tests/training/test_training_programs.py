"""Whole programs: scripts/examples/plain_pytorch.py, and one without POSIX's own names."""

import re
import sys

import pytest
from helpers import commands
from helpers.sets import names_in, set_names

EXAMPLE = commands.ROOT / "scripts" / "examples" / "plain_pytorch.py"


def run(ranks, steps, checkpoint):
    """Gradient norms by step, as the example prints them."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    text = commands.run([*start, str(EXAMPLE), "--steps", str(steps), str(checkpoint)])
    found = re.findall(r"step (\d+) loss \S+ gradient norm (\S+)", text)
    return {int(step): float(norm) for step, norm in found}


@pytest.mark.long
def test_trains_saves_and_resumes_at_other_numbers_of_ranks(tmp_path):
    text = EXAMPLE.read_text()
    starts = re.findall(r"(?:--nproc-per-node (\d+) )?\S+plain_pytorch.py --steps (\d+)", text)
    assert starts == [("2", "20"), ("4", "40"), ("", "60")]
    norms = {}
    for ranks, steps in starts:
        part = run(int(ranks or 1), int(steps), tmp_path / "run" / "checkpoint_last.pt")
        assert list(part) == list(range(int(steps) - 19, int(steps) + 1))
        norms |= part
    alone = run(1, 60, tmp_path / "alone.pt")
    assert min(alone.values()) > 0.05  # clipping was active in every step
    # a rank's aux loss is of its own tokens, so ranks agree up to its small weight
    assert [norms[step] for step in alone] == pytest.approx(list(alone.values()), rel=2e-2)
    assert names_in(tmp_path / "run") == set_names("checkpoint_last", 1)


_PROGRAM = """
import os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty"):
    sys.modules[name] = None  # importing it raises ImportError
for name in dir(signal):
    if name.startswith("SIG") and not name.startswith("SIG_") and name not in (
        "SIGABRT", "SIGBREAK", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"
    ):
        delattr(signal, name)
for name in ("pthread_sigmask", "sigwait", "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK"):
    delattr(signal, name)
import torch  # it may use what it finds
for name in ("O_DIRECTORY", "sched_getaffinity", "sched_setaffinity", "fork", "getuid", "uname"):
    delattr(os, name)

import fairseq_tutel.checkpoint
from fairseq_tutel import training
from fairseq_tutel.moe import MoELayer

path = sys.argv[1]
layer = MoELayer(8, 2)
layer(torch.randn(4, 8)).sum().backward()
training.save_checkpoint(path, layer, torch.optim.SGD(layer.parameters(), lr=0.1), {"step": 3})
assert training.load_checkpoint(path, MoELayer(8, 2)) == {"step": 3}
"""


@pytest.mark.long
def test_without_the_names_of_posix(tmp_path):
    commands.run([sys.executable, "-c", _PROGRAM, str(tmp_path / "run" / "checkpoint_last.pt")])
