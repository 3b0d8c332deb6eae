"""How long the layers of one step take from dispatch to combine, forth and back.

Nothing waits for the measurement: on a GPU the times come from events of its stream, read when they
are there; on a CPU from the clock. The backward pass goes from a hook to a function that hands the
gradient on as it is. Recomputation counts, as activation checkpointing has it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from .routing import Routing


class RegionTimer:
    """Times of one step of training.

    Args:
        measures: else it only takes note of loads.
    """

    def __init__(self, measures: bool = True):
        self._measures = measures
        self._spans: list[tuple] = []
        # whose backward pass has not ended; a graph that is dropped before it has none to come, as
        # recomputation without reentrant autograd makes one
        self._open: weakref.WeakSet[_Token] = weakref.WeakSet()
        self._loads: list[tuple] = []

    def around(
        self, x: torch.Tensor, region: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """``region(x)``, timed. Differentiable; without a gradient of x only the forward pass."""
        if not self._measures:
            return region(x)
        return self._around(x, region)

    @torch.compiler.disable  # a trace does not see the clock
    def _around(self, x, region):
        begin = _mark(x.device)
        if torch.is_grad_enabled() and x.requires_grad:
            token = _Token(self)
            y = region(_Enter.apply(x, token))
            # a function here would make y a view, which could not be changed in place
            y.register_hook(token.enter_backward)
            self._open.add(token)
        else:
            y = region(x)
        self._spans.append((begin, _mark(x.device)))
        return y

    def take_load(self, count_E: torch.Tensor) -> None:
        """Note how many rows this rank sends to each expert in one layer."""
        most = count_E.max()
        # on a GPU read later, when the copy is there anyway
        self._loads.append((most.to("cpu", non_blocking=True), _mark(count_E.device)))

    @property
    def microseconds(self) -> int | None:
        """Of all layers together; None as long as it is not known."""
        if not self._spans or self._open or not all(_is_there(end) for _, end in self._spans):
            return None
        return max(1, round(sum(_between(*span) for span in self._spans)))

    @property
    def load(self) -> int:
        """Most rows to an expert in any layer, of those that are known; 0 if none is."""
        return max((int(most) for most, mark in self._loads if _is_there(mark)), default=0)


def timed(
    timer: RegionTimer | None,
    region: Callable[[torch.Tensor], torch.Tensor],
    x_TM: torch.Tensor,
    routing: Routing,
) -> torch.Tensor:
    """``region(x_TM)``, for a timer where there is one."""
    if timer is None:
        return region(x_TM)
    if not routing.padded:
        timer.take_load(routing.num_kept_per_expert_E)
    return timer.around(x_TM, region)


class _Token:
    """One region of one forward pass."""

    def __init__(self, timer: RegionTimer):
        self.timer = timer
        self.begin = None

    def enter_backward(self, grad):
        self.begin = _mark(grad.device)

    def leave_backward(self, device):
        if self.begin is not None:
            self.timer._spans.append((self.begin, _mark(device)))
            self.timer._open.discard(self)


class _Enter(torch.autograd.Function):
    """Where the forward pass begins, the backward pass ends."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.token.leave_backward(grad.device)
        return grad, None


def _mark(device):
    if device.type != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _is_there(mark):
    return isinstance(mark, int) or mark.query()


def _between(begin, end):
    """Microseconds."""
    return (end - begin) / 1000 if isinstance(begin, int) else 1000 * begin.elapsed_time(end)
