"""Wall and device time of exchanges, for ``--record-a2a-perf-stats``."""

from __future__ import annotations

import contextlib
import time

import torch

from .base import Exchange, Wrapper


class TimedExchange(Wrapper):
    """Adds up the time spent in ``forth`` and ``back``; gradients are not timed.

    NOTE: it synchronises with the device before and after each exchange, which slows training
    down; it is a measuring tool.

    Attributes:
        cpu_ms, cuda_ms: wall time, and time between events on a GPU (else 0).
    """

    def __init__(self, inner: Exchange):
        super().__init__(inner)
        self.cpu_ms = 0.0
        self.cuda_ms = 0.0

    def forth(self, rows, parts=None):
        """As the inner exchange."""
        with self._measure(rows.device):
            return self.inner.forth(rows, parts)

    def back(self, rows, parts=None):
        """As the inner exchange."""
        with self._measure(rows.device):
            return self.inner.back(rows, parts)

    @contextlib.contextmanager
    def _measure(self, device: torch.device):
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        yield
        if on_gpu:
            end.record()
            torch.cuda.synchronize()
            self.cuda_ms += begin.elapsed_time(end)
        self.cpu_ms += 1000 * (time.perf_counter() - start)
