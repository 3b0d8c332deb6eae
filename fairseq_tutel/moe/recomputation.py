"""Find out whether code runs in an activation checkpoint, and which call a recomputation repeats.

A checkpoint runs a function twice: in the forward pass, and again in the backward pass. torch has
no public way to tell which forward pass the second run belongs to. But one object lives from the
first run to the second: the context ``ctx`` of the autograd function (re-entrant checkpoints of
torch, fairseq and others), or the frame of torch's non-reentrant checkpoint. It is on Python's
stack in both runs, and a note on it is seen by the recomputations of that run alone.
"""

import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import FunctionCtx

from .torch_modes import untraced

_Value = TypeVar("_Value")
_NOTES = "_fairseq_tutel_notes"
_AGAIN = ("backward", "unpack_hook")
_NAMES = ("forward", "checkpoint", *_AGAIN)  # of a checkpoint's functions in its two runs


class Checkpoint(NamedTuple):
    """A run of a checkpointed function that has not ended."""

    notes: dict[Any, Any]  # lives as long as a recomputation may come
    again: bool  # whether this run is a recomputation
    hides_gradients: bool  # whether gradients come only with a recomputation


def checkpoints() -> list[Checkpoint]:
    """Return the checkpoints around the caller's code, innermost first.

    A backward method counts as a recomputation, also one that recomputes nothing.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _NAMES and (state := _state_of(frame)) is not None:
            again = frame.f_code.co_name in _AGAIN
            # an autograd function switches gradients off; without edges they were off before
            hides = not again and bool(getattr(state, "next_functions", ()))
            found.append(Checkpoint(vars(state).setdefault(_NOTES, {}), again, hides))
        frame = frame.f_back
    return found


def _state_of(frame: FrameType) -> Any:
    """Return the object that a checkpoint keeps for its recomputation; None for other frames."""
    if frame.f_code.co_varnames[:1] == ("ctx",):
        ctx = frame.f_locals.get("ctx")
        return ctx if isinstance(ctx, FunctionCtx) else None
    if frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        return None
    if frame.f_code.co_name == "unpack_hook":
        return frame.f_locals.get("frame")
    first_run = getattr(frame.f_locals.get("gen"), "gi_frame", None)  # None: it is re-entrant
    return None if first_run is None else first_run.f_locals.get("new_frame")


def is_recomputing() -> bool:
    """Return whether a checkpoint runs the caller's code again, in a backward pass."""
    return any(each.again for each in checkpoints())


def has_gradients() -> bool:
    """Return whether the caller's operations get gradients, now or by a recomputation."""
    return torch.is_grad_enabled() or _are_hidden()


@untraced
def _are_hidden() -> bool:
    return any(each.hides_gradients for each in checkpoints())


def recalled(key: Any, compute: Callable[[], _Value]) -> _Value:
    """Return ``compute()``; in a recomputation what it returned in the run that is repeated.

    Calls with one key come in the same order in both runs.
    """
    around = checkpoints()
    known = next((each.notes.get(key) for each in around if each.again), None)
    if known:
        value = known.popleft()
        known.append(value)  # for another backward pass through the same graph
    else:
        value = compute()
    for each in around:
        if each.again:
            break
        each.notes.setdefault(key, deque()).append(value)
    return value
