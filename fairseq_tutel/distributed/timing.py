"""Wall and device time of exchanges, for ``--record-a2a-perf-stats``."""

from __future__ import annotations

import contextlib
import time

import torch


class ExchangeTimer:
    """Sum of the time spent inside ``with timer.measure():`` blocks.

    NOTE: a running timer synchronises with the device around each block, which slows training down;
        it is
    a measuring tool.

    Args:
        device: where the exchanges run.
        enabled: False makes every block free and every sum zero.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self._on_gpu = device.type == "cuda"
        self._enabled = enabled
        self.cpu_ms = 0.0
        self.cuda_ms = 0.0

    @contextlib.contextmanager
    def measure(self):
        """Add the duration of the block to ``cpu_ms`` and, on a GPU, ``cuda_ms``."""
        if not self._enabled:
            yield
            return
        if self._on_gpu:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        yield
        if self._on_gpu:
            end.record()
            torch.cuda.synchronize()
            self.cuda_ms += begin.elapsed_time(end)
        self.cpu_ms += 1000 * (time.perf_counter() - start)
