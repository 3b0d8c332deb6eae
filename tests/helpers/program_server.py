"""Runs command lines in forked processes, for :class:`helpers.programs.Programs`.

Reads one JSON list of processes per line, runs them at once and answers with their exit statuses,
into a pipe of its own (the number of its file is the second argument).
It has imported what fairseq's programs import, but nothing of this package: that is theirs.
"""

import gc
import importlib
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

# seconds that the other processes of a request get, once one has failed
GRACE = 10.0


def _wait(pids: list[int], seconds: float) -> list[int]:
    """The exit statuses of children, as subprocess has them; what outstays its time is killed."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                end = min(end, time.monotonic() + GRACE) if statuses[pid] else end
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def _prepare(process: dict) -> None:
    """What a shell and the interpreter's start would have done."""
    for target, path in enumerate(process["streams"]):
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if target else os.O_RDONLY
        os.dup2(os.open(path, mode), target)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.root.handlers.clear()  # fairseq's programs set up logging, where nobody did before
    logging.root.setLevel(logging.WARNING)
    os.chdir(process["cwd"])
    os.environ.update(process["env"])
    sys.argv = list(process["argv"])
    if sys.argv[0] == "-m":
        sys.orig_argv = [sys.executable, *sys.argv]
    exec(process["prelude"], {})


def _serve() -> dict:
    """Answers requests; returns a process to run, in the child that is to be it."""
    answers = os.fdopen(int(sys.argv[2]), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for process in request["processes"]:
            pids.append(os.fork())
            if pids[-1] == 0:
                return process
        answers.write(f"{json.dumps(_wait(pids, request['timeout']))}\n")
        answers.flush()
    sys.exit(0)


def _console_script(name: str):
    """The function that it calls; where fairseq is a folder on PYTHONPATH there are no scripts."""
    found = list(entry_points(group="console_scripts", name=name))
    if found:
        return found[0].load()
    module = name.removeprefix("fairseq-").replace("-", "_")
    return importlib.import_module(f"fairseq_cli.{module}").cli_main


def _run() -> int:
    """The exit code of what sys.argv says."""
    try:
        if sys.argv[0] == "-m":
            module, sys.argv = sys.argv[1], sys.argv[1:]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        sys.exit(_console_script(os.path.basename(sys.argv[0]))())
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


if sys.dont_write_bytecode:  # compile what a program imports once, not in every child
    sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
gc.disable()  # a child would copy every page that a collection touches
_prepare(_serve())
_code = _run()
sys.stdout.flush()
sys.stderr.flush()
os._exit(_code)  # taking an interpreter of this size down takes seconds
