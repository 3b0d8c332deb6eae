"""One line for a user's error, where a fairseq program would end with a traceback per rank.

A wrong option, file or number of ranks is a ValueError that a ``raise`` statement of this package
raised, with what is wrong and what to do in its text; the traceback through fairseq adds nothing.
Any other error keeps its traceback, and so does every error where the program is not one of
fairseq's, or ``FAIRSEQ_TUTEL_TRACEBACK=1``. Ctrl-C is reported in one line by the first rank.
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
from . import option_errors, user_errors
from .programs import program

_PACKAGE = str(Path(__file__).resolve().parents[2])
_VARIABLE = "FAIRSEQ_TUTEL_TRACEBACK"
# functions that print an error: the one below, and torch's, which calls it
_HOOKS = ("excepthook", "_distributed_excepthook")
_interrupted = False


def install() -> None:
    """Put the hook before the one that is there; for fairseq's own programs only."""
    if program() is None:
        return
    sys.excepthook = _hook(sys.excepthook)
    option_errors.install()
    if program() == "fairseq-hydra-train":
        # Hydra then leaves errors to the hook, and prints those of others in full
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)


def is_user_error(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether the error is a ValueError or OSError that a ``raise`` in this package raised.

    Not one that passes another kind of error on, as where a save fails for a reason of its own.
    """
    frames = traceback.extract_tb(trace)
    return (
        _is_value_or_os_error(error)
        and bool(frames)
        and os.path.realpath(frames[-1].filename).startswith(_PACKAGE + os.sep)
        and (frames[-1].line or "").startswith("raise ")
    )


def _is_value_or_os_error(error: BaseException | None) -> bool:
    return error is None or (
        isinstance(error, (ValueError, OSError)) and _is_value_or_os_error(error.__cause__)
    )


def one_line(text: str) -> str:
    """What a user reads of an error."""
    rank, world_size = process_world()
    where = f" (rank {rank})" if world_size > 1 else ""
    return f"{program()}: error{where}: {text} [{_VARIABLE}=1 shows where]\n"


def _interrupt(signum, frame):
    """As Python's own handler, but the printing of an error is not interrupted."""
    global _interrupted
    _interrupted = True
    while frame is not None:
        if frame.f_code.co_name in _HOOKS:
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _hydra_failed_to_print(error: BaseException) -> bool:
    """Whether it is hydra-core 1.0's failure to print an error on Python 3.10, where an argument of
    ``traceback.print_exception`` lost its name; the error itself is its context."""
    lost = isinstance(error, TypeError) and "argument 'etype'" in str(error)
    return lost and error.__context__ is not None


def _hook(before):
    def excepthook(kind, error, trace):
        if _hydra_failed_to_print(error):
            error = error.__context__
            kind, trace = type(error), error.__traceback__
        if os.environ.get(_VARIABLE, "0") not in ("", "0"):
            before(kind, error, trace)
        elif _interrupted or isinstance(error, KeyboardInterrupt):
            # also where a rank fails because another has ended before it
            if os.environ.get("RANK", "0") == "0" and process_world()[0] == 0:
                sys.stderr.write(f"{program()}: interrupted\n")
        elif is_user_error(error, trace):
            sys.stderr.write(one_line(str(error)))
        elif (text := user_errors.explain(error, trace)) is not None:
            sys.stderr.write(one_line(text))
        else:
            before(kind, error, trace)

    return excepthook
