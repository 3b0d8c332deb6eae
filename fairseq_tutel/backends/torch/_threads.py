"""Fewer parallel loops on CPUs: independent parts on a thread each, and small work on one thread.

A parallel loop waits for its slowest thread at its end. A chain of short ones waits each time, and
badly where another process uses a core: an elementwise operation that takes 10 us on one thread was
seen to take 3 ms on two. Threads that take whole parts from a queue wait once, and work that one
thread does in 10 us needs no second one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

import torch

# Elements up to which a second thread gains nothing even on an idle machine.
_SMALL_NUMEL = 1 << 17

_P = ParamSpec("_P")
_R = TypeVar("_R")


def small_on_one_thread(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of CPU tensors that keeps to one thread if they are small."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        threads = torch.get_num_threads()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        small = all(x.device.type == "cpu" and x.numel() <= _SMALL_NUMEL for x in tensors)
        if threads == 1 or not small:
            return function(*args, **kwargs)
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return wrapper


def share_out(run: Callable[[Iterator[int]], None], count: int) -> None:
    """Call ``run`` on iterators that together yield 0 to ``count - 1``, each number once.

    With parts enough for torch's threads, ``run`` is called once on each of that many threads, on
    which torch computes without further threads and without gradients; otherwise once, here.

    An error on a thread is raised here, after all threads have ended their parts: they write into
    buffers that the caller is about to lose.
    """
    # next() of this iterator is one step for the interpreter: no two threads get the same number
    parts = iter(range(count))
    threads = torch.get_num_threads()
    if threads == 1 or (count % threads and count < 2 * threads):
        run(parts)
        return
    pool = _pool(threads, os.getpid())
    inference = torch.is_inference_mode_enabled()
    jobs: list[Future] = []
    try:
        for _ in range(threads):
            jobs.append(pool.submit(_in_mode, inference, run, parts))
        wait(jobs, return_when=FIRST_EXCEPTION)
        for job in jobs:
            if job.done():
                job.result()
    finally:
        # after an error, or an interrupt while waiting: nobody takes another part
        for _ in parts:
            pass
        wait(jobs)


def _in_mode(inference: bool, run, parts) -> None:
    # modes are settings of each thread
    with torch.inference_mode(inference), torch.no_grad():
        run(parts)


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process; a forked child has none of its parent's and makes its own."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="fairseq_tutel-experts")
    all_started = threading.Barrier(threads)

    def settle():
        torch.get_num_threads()  # the first look sets a thread to the default
        all_started.wait()
        torch.set_num_threads(1)

    for ready in [pool.submit(settle) for _ in range(threads)]:
        ready.result()
    # that was for the pool's threads, but it also became the default of threads to come
    torch.set_num_threads(threads)
    return pool
