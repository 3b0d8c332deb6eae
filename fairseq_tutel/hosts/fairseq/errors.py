"""Refusals of this package in one line, where a fairseq program would end with a traceback.

A user's mistake (an option, a file, a number of ranks) is told by a ValueError that a ``raise`` of
this package raised; its text says what is wrong and what to do. The traceback through fairseq says
nothing more, once per rank. Anything else keeps its traceback, and so does every error where the
program is not one of fairseq's, or ``FAIRSEQ_TUTEL_TRACEBACK=1``. Ctrl-C is no error: it is told in
one word by the first rank.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from ...distributed import process_world
from . import known_mistakes, option_errors
from .programs import program

_PACKAGE = str(Path(__file__).resolve().parents[2])
_VARIABLE = "FAIRSEQ_TUTEL_TRACEBACK"
# functions that tell an error: the one below, and torch's, which calls it
_HOOKS = ("excepthook", "_distributed_excepthook")
_interrupted = False


def install() -> None:
    """Put the hook before the one that is there; for fairseq's own programs only."""
    if program() is None:
        return
    sys.excepthook = _hook(sys.excepthook)
    option_errors.install()
    if program() == "fairseq-hydra-train":
        # Hydra then leaves errors to the hook, and shows those that it does not know to the full
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)


def is_refusal(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether the error is a ValueError or OSError that a ``raise`` in this package raised.

    Not one that passes another kind of error on, as where a save fails for a reason of its own.
    """
    frames = traceback.extract_tb(trace)
    return (
        _is_mistake(error)
        and bool(frames)
        and os.path.realpath(frames[-1].filename).startswith(_PACKAGE + os.sep)
        and (frames[-1].line or "").startswith("raise ")
    )


def _is_mistake(error: BaseException | None) -> bool:
    return error is None or (
        isinstance(error, (ValueError, OSError)) and _is_mistake(error.__cause__)
    )


def one_line(text: str) -> str:
    """What a user reads of a refusal."""
    rank, world_size = process_world()
    where = f" (rank {rank})" if world_size > 1 else ""
    return f"{program()}: error{where}: {text} [{_VARIABLE}=1 shows where]\n"


def _interrupt(signum, frame):
    """As Python's own handler, but an error that is being told already is told to its end."""
    global _interrupted
    _interrupted = True
    while frame is not None:
        if frame.f_code.co_name in _HOOKS:
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _hydra_failed_to_tell(error: BaseException) -> bool:
    """Whether it is hydra-core 1.0's failure to print an error on Python 3.10, where an argument of
    ``traceback.print_exception`` lost its name; the error itself is its context."""
    lost = isinstance(error, TypeError) and "argument 'etype'" in str(error)
    return lost and error.__context__ is not None


def _hook(before):
    def excepthook(kind, error, trace):
        if _hydra_failed_to_tell(error):
            error = error.__context__
            kind, trace = type(error), error.__traceback__
        if os.environ.get(_VARIABLE, "0") not in ("", "0"):
            before(kind, error, trace)
        elif _interrupted or isinstance(error, KeyboardInterrupt):
            # also where a rank fails because another has ended before it
            if os.environ.get("RANK", "0") == "0" and process_world()[0] == 0:
                sys.stderr.write(f"{program()}: interrupted\n")
        elif is_refusal(error, trace):
            sys.stderr.write(one_line(str(error)))
        elif (text := known_mistakes.explain(error, trace)) is not None:
            sys.stderr.write(one_line(text))
        else:
            before(kind, error, trace)

    return excepthook
