"""Process groups at the end of a process.

A worker thread of gloo drops an operation's tensors some time after the operation is over. The
tensors belong to Python: a thread that drops one while the interpreter shuts down is ended in the
middle of C++, which aborts the process ("terminate called without an active exception") or leaves
it waiting for ever. torch joins the threads of a group once nothing refers to it, so what this
package made drops its groups first, before the interpreter begins to shut down.
"""

from __future__ import annotations

import atexit
import glob
import sys
import time
import weakref
from typing import Protocol

import torch
import torch.distributed as dist

from . import world


class Holder(Protocol):
    """Refers to process groups."""

    def release(self) -> None:
        """Refer to them no longer."""


_holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()


def release_at_exit(holder: Holder) -> None:
    """Call ``holder.release()`` when the process ends, and join the threads of its groups."""
    if not _holders:
        atexit.unregister(_leave)
        atexit.register(_leave)
    _holders[id(holder)] = holder


def _leave() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # failed: others may wait for this rank, and joining could wait for them
    for holder in list(_holders.values()):
        holder.release()
    world.forget()
    # what NCCL still has to do may need ranks that are gone; gloo's groups have nothing left to do
    if dist.is_initialized() and (dist.get_backend() == "gloo" or not torch.cuda.is_available()):
        dist.destroy_process_group()
    _wait_for_workers()


def _wait_for_workers(seconds: float = 1.0) -> None:
    """Let threads finish whose groups others refer to, as DistributedDataParallel does."""
    deadline = time.monotonic() + seconds
    asleep = 0
    while asleep < 3 and time.monotonic() < deadline:
        states = _worker_states()
        if not states:
            return
        asleep = asleep + 1 if set(states) == {"S"} else 0
        time.sleep(0.002)  # without the interpreter's lock, which they may be waiting for


def _worker_states() -> list[str]:
    """The scheduler's states (R, S, ...) of gloo's worker threads; empty where it is unknown."""
    states = []
    for path in glob.glob("/proc/self/task/*/stat"):
        try:
            with open(path) as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # ended meanwhile
            continue
        if "gloo_runloop" in name:
            states.append(rest.split()[0])
    return states
