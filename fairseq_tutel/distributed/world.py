"""Helpers for the default process group: small messages, cached values, a clean exit."""

import atexit
import datetime
import glob
import hashlib
import itertools
import json
import socket
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# (received, mine, group): one tensor for all ranks' parts; torch 2.13 gave it another name
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# The default process group, and the values made for it. A value may be the default group itself, so
# a weak dictionary would never drop it.
_made: tuple[Any, dict[Hashable, Any]] = (None, {})
# objects that refer to process groups, by id; the attributes that do so, by type
_holders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_attributes: dict[type, tuple[str, ...]] = {}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_world() -> tuple[int, int]:
    """Return (rank, world size) of this process; not collective.

    >>> process_world()  # without a process group
    (0, 1)
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def once_per_world(key: Hashable, make: Callable[[], Any]) -> Any:
    """Call ``make()`` once per key and default group; return its result."""
    global _made
    if _made[0] is not dist.group.WORLD:
        _made = (dist.group.WORLD, {})
    if key not in _made[1]:
        _made[1][key] = make()
    return _made[1][key]


def control_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the device type of small control tensors of a group, ``cuda`` or ``cpu``.

    The CPU if the group can use it (gloo, or the default of ``init_process_group``, which has a
    backend for each device), so that the host does not wait for the GPU.
    """
    return "cuda" if dist.get_backend(group) in ("nccl", "cuda:nccl") else "cpu"


def data_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device that a group communicates from: the GPU if it has a backend for GPUs."""
    on_gpu = "nccl" in dist.get_backend_config(group) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def gather_integers(
    values: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """Gather the integers of every rank of a group, in rank order. Collective.

    All ranks give equally many.
    """
    mine = torch.tensor(values, dtype=torch.int64, device=control_device(group))
    everyone = mine.new_empty(dist.get_world_size(group) * len(values))
    all_gather_tensor(everyone, mine, group=group)
    return everyone.view(-1, len(values)).tolist()


def gather_texts(text: str | None, group: dist.ProcessGroup | None = None) -> list[str | None]:
    """Gather one short text (or None) of every rank of a group, in rank order. Collective.

    >>> gather_texts("ready")
    ['ready']
    """
    return gather_objects(text, group)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one value of every rank of a group, pickled, in rank order. Collective."""
    if process_world()[1] == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_on_first(value: Any) -> list[Any] | None:
    """Return the value of every rank, in rank order, on rank 0; None on others. Collective.

    Values are pickled. Ranks may be days apart, if all of them have made a first call together.
    """
    rank, world_size = process_world()
    if world_size == 1:
        return [value]
    group = once_per_world("patient group", _patient_group)
    values: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(value, values, group=group)
    return values


def _patient_group() -> Any:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


def refuse_differences(name: str, values: Sequence[Hashable], first_rank: int = 0) -> None:
    """Raise ValueError if a setting of the ranks from ``first_rank`` on differs; list them."""
    ranks_by_value: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values, start=first_rank):
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) > 1:
        listing = "; ".join(f"{v} on ranks {r}" for v, r in sorted(ranks_by_value.items()))
        raise ValueError(f"MoE ranks disagree on {name}: {listing}")


def compare_settings(
    settings: Mapping[str, float | str], group: dist.ProcessGroup | None = None, first_rank: int = 0
) -> None:
    """Compare settings of the ranks of a group by name. Collective; all ranks have the same names.

    ``first_rank`` is the number of the group's first rank among all ranks. ValueError is raised by
    :func:`refuse_differences`.
    """
    texts = gather_texts(json.dumps(list(settings.values())), group)
    by_name = zip(*(json.loads(text or "") for text in texts), strict=True)
    for name, values in zip(settings, by_name, strict=True):
        refuse_differences(name, values, first_rank)


def checksum(text: str) -> int:
    """Return a 56-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def ranks_per_node() -> int:
    """Return m if every machine holds m consecutive ranks, else 0. Collective on the first call."""
    if process_world()[1] == 1:
        return 1
    return once_per_world(
        "ranks per node", lambda: even_nodes([m for (m,) in gather_integers([this_machine()])])
    )


def even_nodes(machines: Sequence[Hashable]) -> int:
    """Return the ranks per node from each rank's machine; 0 if nodes are unequal or interleaved."""
    runs = [(machine, len(list(run))) for machine, run in itertools.groupby(machines)]
    lengths = {length for _, length in runs}
    once_each = len({machine for machine, _ in runs}) == len(runs)
    return lengths.pop() if once_each and len(lengths) == 1 else 0


def this_machine() -> int:
    """Return a number that ranks on one machine share.

    It is a hash of the boot id and the host name. Machines of one image may have the same name;
    containers of one machine have the same boot id.
    """
    boot = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.exists() else ""
    return checksum(f"{boot}\n{socket.gethostname()}")


# A worker thread of gloo releases an operation's tensors afterwards, and needs the interpreter for
# that. If the interpreter is shutting down, the process aborts ("terminate called without an active
# exception") or hangs. torch joins a group's threads once nothing refers to the group. So objects
# of this package drop their groups before the shutdown.


def release_at_exit(holder: Any, *attributes: str) -> None:
    """When the process ends, set attributes to None and join the threads of their groups."""
    if all(not getattr(holder, name) for name in attributes):
        return  # no process group among them
    if not _holders:
        atexit.unregister(_release_groups)
        atexit.register(_release_groups)
    _holders[id(holder)] = holder
    _attributes[type(holder)] = attributes


def _release_groups() -> None:
    global _made
    if getattr(sys, "last_value", None) is not None:
        return  # failed: others may wait for this rank, and joining could wait for them
    for holder in list(_holders.values()):
        for name in _attributes[type(holder)]:
            object.__setattr__(holder, name, None)
    _made = (None, {})
    # what NCCL still has to do may need ranks that are gone; gloo's groups have nothing left to do
    if dist.is_initialized() and (dist.get_backend() == "gloo" or not torch.cuda.is_available()):
        dist.destroy_process_group()
    _wait_for_workers()


def _wait_for_workers(seconds: float = 1.0) -> None:
    """Wait for gloo's threads in groups that others keep, such as DistributedDataParallel."""
    deadline = time.monotonic() + seconds
    asleep = 0  # times in a row that all threads were found asleep
    while asleep < 3 and time.monotonic() < deadline:
        states = _worker_states()
        if not states:
            return
        asleep = asleep + 1 if set(states) == {"S"} else 0
        time.sleep(0.002)  # without the interpreter's lock, which they may be waiting for


def _worker_states() -> list[str]:
    """Return the scheduler's states (R, S, ...) of gloo's worker threads; empty if unknown."""
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
