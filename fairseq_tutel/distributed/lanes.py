"""Where an exchange runs while the caller goes on: a second CUDA stream, or a thread on a CPU.

Work on a lane runs in the order in which it was submitted. All ranks submit theirs in one order, so
that collectives meet.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch


class Lane(Protocol):
    """Runs work in order of submission."""

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work; the returned function waits for it, and raises what it raised."""


class InlineLane:
    """At once: nothing overlaps."""

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run it."""
        work()
        return lambda: None


class WorkerLane:
    """One thread, for groups that communicate from the CPU (gloo).

    Collectives of the main thread on the same groups must not run meanwhile: they could meet the
    worker's in another order on another rank.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        atexit.register(self._thread.shutdown, wait=False, cancel_futures=True)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Hand it to the thread."""
        inference = torch.is_inference_mode_enabled()
        return self._thread.submit(_in_mode, inference, work).result


class StreamLane:
    """A second stream of a GPU; the launching thread stays the caller's, as NCCL wants it.

    Each piece of work has an event of its own: it starts when all work that the caller's stream had
    been given is done, and whoever waits makes only his stream wait, not the host. The caller keeps
    the tensors of the work alive until he has waited.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launch it on the stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_event(done)


@functools.cache
def lane_of(device: torch.device) -> Lane:
    """The lane of a device; one per process."""
    return StreamLane(device) if device.type == "cuda" else WorkerLane()


def _in_mode(inference, work):
    # modes are settings of each thread; tensors of inference mode may be filled in it only
    with torch.inference_mode(inference), torch.no_grad():
        work()
