"""Refusals of this package in one line, where a fairseq program would end with a traceback.

A user's mistake (an option, a file, a number of ranks) is told by a ValueError that a ``raise`` of
this package raised; its text says what is wrong and what to do. The traceback through fairseq says
nothing more, once per rank. Anything else keeps its traceback, and so does every error where the
program is not one of fairseq's, or ``FAIRSEQ_TUTEL_TRACEBACK=1``. (Hydra shows errors in its own
way, ``HYDRA_FULL_ERROR=1`` there.)
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from ..distributed import process_world

_PACKAGE = str(Path(__file__).resolve().parents[1])
_VARIABLE = "FAIRSEQ_TUTEL_TRACEBACK"


def install() -> None:
    """Put the hook before the one that is there; for fairseq's own programs only."""
    if _is_fairseq_program():
        sys.excepthook = _hook(sys.excepthook)


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


def one_line(error: BaseException) -> str:
    """What a user reads of a refusal."""
    rank, world_size = process_world()
    where = f" (rank {rank})" if world_size > 1 else ""
    program = os.path.basename(sys.argv[0])
    return f"{program}: error{where}: {error} [{_VARIABLE}=1 shows where]\n"


def _is_fairseq_program() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    by_name = os.path.basename(sys.argv[0]).startswith("fairseq-")
    return by_name or getattr(spec, "name", "").startswith("fairseq_cli.")


def _hook(before):
    def excepthook(kind, error, trace):
        if os.environ.get(_VARIABLE, "0") not in ("", "0") or not is_refusal(error, trace):
            before(kind, error, trace)
        else:
            sys.stderr.write(one_line(error))

    return excepthook
