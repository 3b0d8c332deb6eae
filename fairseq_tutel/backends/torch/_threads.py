"""Fewer parallel loops on CPUs: independent parts on a thread each, and small work on one thread.

A parallel loop waits for its slowest thread at its end. A chain of short ones waits each time, and
badly where another process uses a core: an elementwise operation that takes 10 us on one thread was
seen to take 3 ms on two. Threads that take whole parts from a queue wait once, and work that one
thread does in 10 us needs no second one.

The threads are torch's own, those of OpenMP. They spin for milliseconds after each parallel loop of
torch's, waiting for the next, and would take half of every core from threads of another pool.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
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


def parallel_for(run: Callable[[Iterator[int]], None], count: int) -> None:
    """Call ``run`` on iterators that together yield 0 to ``count - 1``, each number once.

    With parts enough for torch's threads, ``run`` is called once on each of them, where torch
    computes without further threads and without gradients; otherwise once, here.

    An error on a thread is raised here, after all threads have ended their parts: they write into
    buffers that the caller is about to lose.
    """
    # next() of this iterator is one step for the interpreter: no two threads get the same number
    parts = iter(range(count))
    threads = torch.get_num_threads()
    parallel = None
    if threads > 1 and (count % threads == 0 or count >= 2 * threads):
        parallel = _openmp_parallel()
    if parallel is None:
        run(parts)
        return
    errors: list[BaseException] = []
    inference = torch.is_inference_mode_enabled()

    def work(_) -> None:
        try:
            # modes are settings of each thread
            with torch.inference_mode(inference), torch.no_grad():
                run(parts)
        except BaseException as error:  # the caller of this function is not Python
            errors.append(error)
            for _ in parts:  # nobody takes another part
                pass

    parallel(_Callback(work), None, threads, 0)
    if errors:
        raise errors[0]


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _openmp_parallel() -> Callable | None:
    """``GOMP_parallel(function, data, threads, flags)`` of the OpenMP that torch uses.

    What a compiler calls for ``#pragma omp parallel``; GNU's, Intel's and LLVM's libraries have it.
    None where there is none: torch built without OpenMP, or for macOS or Windows.
    """
    try:
        # looked up in the library and all that it depends on
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [_Callback, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function
