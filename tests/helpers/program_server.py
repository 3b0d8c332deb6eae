"""Runs command lines in forked processes, each of which ends as a real interpreter would, at once.

Started by :class:`helpers.programs.Programs`; reads one JSON object per line and answers each with
the exit status. It has imported what fairseq's programs import and nothing of this package, which a
program imports itself: by ``--user-dir``, or as ``python -m fairseq_tutel.X``.
"""

import gc
import json
import logging
import os
import runpy
import signal
import sys
import time
from importlib.metadata import entry_points

# what takes the seconds
import fairseq.quantization_utils  # noqa: F401
import fairseq.sequence_scorer  # noqa: F401
import fairseq.trainer  # noqa: F401
import hydra  # noqa: F401
import torch  # noqa: F401
import torch._dynamo  # noqa: F401


def _wait(pid: int, seconds: float) -> int:
    """The exit status of a child, as subprocess has it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def _prepare(request: dict) -> None:
    """What a shell and the interpreter's start would have done."""
    for target, path in enumerate(request["streams"]):
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if target else os.O_RDONLY
        os.dup2(os.open(path, mode), target)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.root.handlers.clear()  # fairseq's programs set up logging, where nobody did before
    logging.root.setLevel(logging.WARNING)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = list(request["argv"])
    if sys.argv[0] == "-m":
        sys.orig_argv = [sys.executable, *sys.argv]
    exec(request["prelude"], {})


def _serve() -> dict:
    """Answers requests; returns one, in the child that is to run it."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        sys.stdout.write(f"{_wait(pid, request['timeout'])}\n")
        sys.stdout.flush()
    sys.exit(0)


def _run() -> int:
    """The exit code of what sys.argv says."""
    try:
        if sys.argv[0] == "-m":
            module, sys.argv = sys.argv[1], sys.argv[1:]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        (script,) = entry_points(group="console_scripts", name=os.path.basename(sys.argv[0]))
        sys.exit(script.load()())
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


gc.disable()  # a child would copy every page that a collection touches
_prepare(_serve())
_code = _run()
sys.stdout.flush()
sys.stderr.flush()
os._exit(_code)  # taking an interpreter of this size down takes seconds
