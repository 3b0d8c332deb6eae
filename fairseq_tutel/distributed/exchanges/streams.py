"""Streams that run an exchange while the caller computes: a CUDA stream, or a thread on a CPU.

A stream runs work in the order of submission. All ranks submit in the same order, so that their
collectives match.
"""

import atexit
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


class ThreadStream:
    """Stream in one thread, for groups that communicate from the CPU (gloo).

    The main thread must not run collectives on the same groups meanwhile.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        atexit.register(self._thread.shutdown, wait=False, cancel_futures=True)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work; return a function that waits for it and raises its error."""
        inference = torch.is_inference_mode_enabled()

        def in_mode():
            # Modes belong to a thread, and inference tensors can be filled in inference mode only.
            with torch.inference_mode(inference), torch.no_grad():
                work()

        return self._thread.submit(in_mode).result


class CudaStream:
    """Second stream of a GPU; the caller's thread launches the work, as NCCL requires.

    Work starts after everything that was queued on the caller's stream before. Waiting makes the
    caller's stream wait, not the host. The caller keeps the tensors of the work alive until then.

    The stream has a high priority, so that NCCL's blocks go before the waiting ones of a product.
    torch has no public switch that keeps products off some multiprocessors; the launcher's NCCL
    profile ``zero-sm`` lets copy engines move the rows.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_event(done)


Stream = ThreadStream | CudaStream


@functools.cache
def stream_of(device: torch.device) -> Stream:
    """Return the stream of a device; one per process."""
    return CudaStream(device) if device.type == "cuda" else ThreadStream()
