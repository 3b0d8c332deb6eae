"""Large buffers that are used again once nobody refers to them.

glibc gives an allocation of 32 MiB and more back to the system when it is freed. The gradients of
large weights would therefore be on new pages in every step, which the kernel finds and clears: 1.2
to 1.6 times the time of a layer's step. ``mallopt`` (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) is as fast
as these buffers (0.97 to 1.06 of the time), but a step then peaks at up to 17 % more memory, and it
would hold for the user's whole process.
"""

import mmap
import os
import sys
import threading

import torch
from torch import Tensor

_LARGE = 32 << 20
# private to the process: what a forked one writes is its own
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def _references(buffers: list[mmap.mmap]) -> list[int]:
    return [sys.getrefcount(buffer) for buffer in buffers]


_lock = threading.Lock()  # a backward pass may run on a thread of its own
_buffers: list[mmap.mmap] = []
_IDLE = _references([mmap.mmap(-1, mmap.PAGESIZE)])[0]  # without a tensor


def _renew_lock() -> None:
    """Give a forked process a free lock: the thread that held it in the parent does not exist."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """``like.new_empty``; a large one on the CPU lies in a buffer that is kept for the next.

    As many buffers are kept as were in use at once; idle ones go when none of them fits.
    """
    dtype = like.dtype if dtype is None else dtype
    shape = torch.Size(shape)
    size = shape.numel() * dtype.itemsize
    if size < _LARGE or like.device.type != "cpu" or not _PRIVATE:
        return like.new_empty(shape, dtype=dtype)
    with _lock:
        buffer = _idle_buffer(size)
        flat = torch.frombuffer(buffer, dtype=dtype, count=size // dtype.itemsize)
        # no view: callers may change an operator's output in place
        return like.new_empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape)


def _idle_buffer(size: int) -> mmap.mmap:
    used = [count > _IDLE for count in _references(_buffers)]
    for buffer, in_use in zip(_buffers, used, strict=True):
        if not in_use and size <= len(buffer) <= 1.25 * size:  # rows differ from step to step
            return buffer
    _buffers[:] = [buffer for buffer, in_use in zip(_buffers, used, strict=True) if in_use]
    _buffers.append(mmap.mmap(-1, size, **_PRIVATE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _buffers[-1].madvise(mmap.MADV_HUGEPAGE)
    return _buffers[-1]
