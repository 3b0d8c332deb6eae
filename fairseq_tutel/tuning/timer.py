"""Time from dispatch to combine of all layers in one step, forward and backward.

Nothing waits for the measurement. On a GPU, times come from events of its stream, read once they
are complete. A backward pass is timed from a hook on the output to one on the input. Recomputation
counts.
"""

import time
import weakref
from typing import Any

import torch

from ..moe.torch_modes import untraced


class RegionTimer:
    """Times of one step of training."""

    def __init__(self):
        self._spans: list[tuple] = []
        # regions whose backward pass has not ended. Weak, because recomputation without reentrant
        # autograd drops a graph that never has a backward pass
        self._open: weakref.WeakSet[_Backward] = weakref.WeakSet()

    @untraced  # a trace cannot read the clock
    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a region; return its input, with gradient, and a span for :meth:`end`."""
        begin, backward = _mark(x.device), None
        if torch.is_grad_enabled() and x.requires_grad:
            backward = _Backward(self)
            x = x.view_as(x)
            x.register_hook(backward.end)
        return x, (begin, backward)

    @untraced
    def end(self, y: torch.Tensor, span: Any) -> torch.Tensor:
        """End a region; return its output, computed from what :meth:`begin` returned."""
        begin, backward = span
        if backward is not None:
            # an autograd function would make y a view, which could not be changed in place
            y.register_hook(backward.start)
            self._open.add(backward)
        self._spans.append((begin, _mark(y.device)))
        return y

    @property
    def microseconds(self) -> int | None:
        """Time of all layers together; None while it is unknown."""
        ends = [end for _, end in self._spans]
        if not ends or self._open or not all(isinstance(end, int) or end.query() for end in ends):
            return None
        return max(1, round(sum(_between(*span) for span in self._spans)))


class _Backward:
    """The backward pass of one region."""

    def __init__(self, timer: RegionTimer):
        self.timer = timer
        self.begin = None

    def start(self, grad):
        self.begin = _mark(grad.device)

    def end(self, grad):
        if self.begin is not None:
            self.timer._spans.append((self.begin, _mark(grad.device)))
            self.timer._open.discard(self)


def _mark(device):
    if device.type != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(begin, end):
    """Return microseconds between two marks."""
    return (end - begin) / 1000 if isinstance(begin, int) else 1000 * begin.elapsed_time(end)
