"""The layer, a loop of one's own and its files work where POSIX's own names are missing."""

import sys

from helpers.commands import run

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


def test_without_the_names_of_posix(tmp_path):
    run([sys.executable, "-c", _PROGRAM, str(tmp_path / "run" / "checkpoint_last.pt")])
