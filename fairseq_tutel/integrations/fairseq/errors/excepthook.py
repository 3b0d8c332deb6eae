"""One line for a user's error, where a fairseq program would end with a traceback per rank.

It has the text of a ValueError, OSError or out of memory that this package raised; text and place
if fairseq raised one of these, a plain Exception or an assertion with a text; the file and the
reason if a file cannot be opened; the key and the reason if Hydra or OmegaConf refuses a value.
Any other error keeps its traceback, and so does every error in other programs.
"""

import os
import re
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

import fairseq
import torch
from omegaconf.errors import OmegaConfBaseException

from ....distributed import process_world
from ..options.fields import REGISTERED
from ..programs import program
from . import arguments
from .reported import is_first_to_report

_PACKAGE = str(Path(__file__).resolve().parents[3])
_FAIRSEQ = str(Path(fairseq.__file__).resolve().parents[1])
_VARIABLE = "FAIRSEQ_TUTEL_TRACEBACK"
# functions that print an error: the one below, and torch's, which calls it
_HOOKS = ("excepthook", "_distributed_excepthook")
_OURS = (ValueError, OSError, torch.OutOfMemoryError)
_interrupted = False


def install() -> None:
    """Put the hook before the present one; in fairseq's own programs only."""
    if program() is None:
        return
    sys.excepthook = _hook(sys.excepthook)
    arguments.install()
    if program() == "fairseq-hydra-train":
        # Hydra then leaves errors to the hook, and prints those of others in full
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    if (
        threading.current_thread() is threading.main_thread()
        # the launcher's ranks begin with the default, and are ended without a traceback
        and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL)
    ):
        signal.signal(signal.SIGINT, _interrupt)


def explain(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return the text of a user's error by its class and by whose code raised it, else None."""
    frames = traceback.extract_tb(trace)
    if not frames or not _is_of_a_user(error):
        return None
    if isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None) or ""
        text = (f"{key}: " if key else "") + str(error).partition("\n")[0]
        registry = REGISTERED.get(key.rpartition(".")[2])
        return f"{text}; {registry.how_to_add()}" if registry else text
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    file = os.path.realpath(frames[-1].filename)
    if file.startswith(_PACKAGE + os.sep):
        return str(error) if isinstance(error, _OURS) else None
    place = os.path.relpath(file, _FAIRSEQ)
    said = re.search("[a-z]{3}", str(error))  # and not numbers alone
    if said and place.partition(os.sep)[0] in ("fairseq", "fairseq_cli"):
        return f"{' '.join(str(error).split())} ({place}:{frames[-1].lineno})"
    return None


def _is_of_a_user(error: BaseException | None) -> bool:
    """Return whether an error and all its causes may be a user's; out of memory always is."""
    if error is None or isinstance(error, (torch.OutOfMemoryError, OmegaConfBaseException)):
        return True
    known = type(error) is Exception or isinstance(error, (*_OURS, AssertionError))
    return known and _is_of_a_user(error.__cause__)


def _hook(before):
    def excepthook(kind, error, trace):
        # hydra-core 1.0 fails to print an error on Python 3.10; the error itself is the context
        if isinstance(error, TypeError) and "argument 'etype'" in str(error) and error.__context__:
            error = error.__context__
            kind, trace = type(error), error.__traceback__
        rank, world_size = process_world()
        if os.environ.get(_VARIABLE, "0") not in ("", "0"):
            before(kind, error, trace)
        elif _interrupted or isinstance(error, KeyboardInterrupt):
            # also if a rank fails because another one has ended
            if os.environ.get("RANK", "0") == "0" and rank == 0:
                sys.stderr.write(f"{program()}: interrupted\n")
        elif (text := explain(error, trace)) is not None:
            where = f" (rank {rank})" if world_size > 1 else ""
            if is_first_to_report(text):
                sys.stderr.write(f"{program()}: error{where}: {text} [{_VARIABLE}=1 shows where]\n")
        else:
            before(kind, error, trace)

    return excepthook


def _interrupt(signum, frame):
    """Raise KeyboardInterrupt like Python's own handler, unless an error is being printed."""
    global _interrupted
    _interrupted = True
    while frame is not None:
        if frame.f_code.co_name in _HOOKS:
            return
        frame = frame.f_back
    raise KeyboardInterrupt
