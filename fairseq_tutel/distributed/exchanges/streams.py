"""Where an exchange runs while the caller goes on: a second CUDA stream, or a thread on a CPU.

Work on a stream runs in the order in which it was submitted. All ranks submit theirs in one order,
so that collectives meet.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch


class Stream(Protocol):
    """Runs work in order of submission."""

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work; the returned function waits for it, and raises what it raised."""


class ThreadStream:
    """One thread, for groups that communicate from the CPU (gloo).

    Collectives of the main thread on the same groups must not run meanwhile.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        atexit.register(self._thread.shutdown, wait=False, cancel_futures=True)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        inference = torch.is_inference_mode_enabled()

        def in_mode():
            # modes are settings of each thread; tensors of inference mode are filled in it only
            with torch.inference_mode(inference), torch.no_grad():
                work()

        return self._thread.submit(in_mode).result


class CudaStream:
    """A second stream of a GPU; the launching thread stays the caller's, as NCCL wants it.

    Work starts when all that the caller's stream had been given is done; whoever waits makes his
    stream wait, not the host, and keeps the tensors of the work alive until then.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_event(done)


@functools.cache
def stream_of(device: torch.device) -> Stream:
    """The stream of a device; one per process."""
    return CudaStream(device) if device.type == "cuda" else ThreadStream()
