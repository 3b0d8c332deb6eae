"""GPUs, NUMA nodes and cores of this machine, and a choice of cores for every rank.

Memory follows the cores: Linux takes it from the node that first writes to it. A test can hand in
another root of /sys and /dev.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ..command_line.starters import Started

# in a process of its own, which is done with the GPUs when it ends
_QUERY_TORCH = """
import torch
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    bus = [getattr(p, "pci_%s_id" % n, None) for n in ("domain", "bus", "device")]
    print("GPU", "-" if None in bus else "%04x:%02x:%02x.0" % tuple(bus))
"""


class Gpu(NamedTuple):
    """A GPU."""

    index: int  # what the ranks call it (as --device-id)
    pci_id: str | None  # its address as /sys spells it; None if unknown


def has_gpu_files(root: str | Path = "/") -> bool:
    """Return whether there are a GPU's files: /dev/nvidiaN, /dev/dxg (WSL) or /dev/kfd (AMD)."""
    dev = Path(root) / "dev"
    return any(dev.glob("nvidia[0-9]*")) or (dev / "dxg").exists() or (dev / "kfd").exists()


def ask_torch(env: Mapping[str, str]) -> str:
    """Return what torch lists; "" if it fails."""
    words, how = [sys.executable, "-c", _QUERY_TORCH], {"text": True, "timeout": 120}
    try:
        return subprocess.check_output(words, env=dict(env), stderr=subprocess.DEVNULL, **how)
    except (OSError, subprocess.SubprocessError):
        return ""


def visible_gpus(env: Mapping[str, str], root: str | Path = "/") -> list[Gpu]:
    """Return the GPUs that torch sees under ``env``, by default in the order of PCI addresses."""
    hidden = env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if hidden or not has_gpu_files(root):
        return []
    found = re.findall(r"^GPU (\S+)$", ask_torch({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **env}), re.M)
    return [Gpu(i, None if pci == "-" else pci) for i, pci in enumerate(found)]


def parse_cpulist(text: str) -> list[int]:
    """Read CPU numbers in Linux's list format: ``0-3,8`` is [0, 1, 2, 3, 8]; "" is []."""
    cpus: set[int] = set()
    for item in filter(None, (item.strip() for item in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"CPU list {text.strip()!r}: cannot read {item!r}")
        cpus |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(cpus)


def format_cpulist(cpus: Iterable[int]) -> str:
    """Write CPU numbers as :func:`parse_cpulist` reads them, with runs as ranges."""
    by_run = groupby(enumerate(sorted(cpus)), lambda place: place[1] - place[0])
    runs = [[cpu for _, cpu in run] for _, run in by_run]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent, or hidden from this container
        return ""


class Topology:
    """CPUs of each NUMA node of a machine, and those that share a core, read from ``root``/sys."""

    def __init__(self, root: str | Path, allowed: Iterable[int]):
        self._system = Path(root) / "sys"
        folders = self._system.glob("devices/system/node/node[0-9]*")
        found = {int(each.name[4:]): parse_cpulist(_read(each / "cpulist")) for each in folders}
        # without nodes of memory only; one node if nothing is listed
        self.numa_cpus = {n: found[n] for n in sorted(found) if found[n]} or {0: sorted(allowed)}

    def node_of(self, gpu: Gpu | None) -> int | None:
        """Return the NUMA node of a GPU; None if sysfs has none (no file, or -1)."""
        if gpu is None or gpu.pci_id is None:
            return None
        node = int(_read(self._system / "bus/pci/devices" / gpu.pci_id / "numa_node") or -1)
        # On a machine with one NUMA node the kernel writes -1, and there is only one answer.
        one = next(iter(self.numa_cpus)) if len(self.numa_cpus) == 1 else None
        return node if node in self.numa_cpus else one

    def cores(self, cpus: Iterable[int]) -> list[list[int]]:
        """Group ``cpus`` into cores, in the order of ``cpus``."""
        cores: dict[int, list[int]] = {}
        for cpu in cpus:
            folder = self._system / f"devices/system/cpu/cpu{cpu}/topology"
            threads = _read(folder / "thread_siblings_list") or _read(folder / "core_cpus_list")
            cores.setdefault(min(parse_cpulist(threads) or [cpu]), []).append(cpu)
        return list(cores.values())

    def share(self, cpus: Sequence[int], index: int, count: int) -> tuple[list[int], int]:
        """Return part ``index`` of ``count`` of ``cpus`` in whole cores, and how many these are."""
        cores = self.cores(cpus)
        if len(cores) < count:  # the scheduler balances better than any fixed choice
            return sorted(cpus), 1
        mine = cores[index * len(cores) // count : (index + 1) * len(cores) // count]
        return sorted(cpu for core in mine for cpu in core), len(mine)


class Binding(NamedTuple):
    """Cores, threads and GPU of one rank."""

    local_rank: int
    gpu: Gpu | None
    cpus: list[int] | None  # None: any
    threads: int  # for OMP_NUM_THREADS: the number of cores
    how: str = "auto"  # who chose the cores, or why they are not next to the GPU

    def __str__(self) -> str:
        return self.how if self.cpus is None else f"{self.how} cores={format_cpulist(self.cpus)}"


def auto_bindings(
    topology: Topology, allowed: set[int], gpus: Sequence[Gpu | None]
) -> list[Binding]:
    """Return one binding per local rank, to the cores in ``allowed``.

    A rank with a GPU gets its share of the cores of that GPU's NUMA node. Others get equal slices
    of whole cores, node by node.
    """
    # in the order of NUMA nodes, so that a slice straddles two of them as rarely as possible
    ordered = [cpu for cpus in topology.numa_cpus.values() for cpu in cpus if cpu in allowed]
    nodes, bindings = [topology.node_of(gpu) for gpu in gpus], []
    for rank, (gpu, node) in enumerate(zip(gpus, nodes, strict=True)):
        near = [] if node is None else sorted(allowed & set(topology.numa_cpus[node]))
        # a starter may hide the others' GPUs: they could be on the same node
        peers = [i for i, other in enumerate(nodes) if not near or other in (node, None)]
        cpus = near or ordered or sorted(allowed)
        share, how = topology.share(cpus, peers.index(rank), len(peers)), "auto"
        if gpu is not None and not near:
            how = f"auto (no allowed core in the GPU's NUMA node, {node})"
        bindings.append(Binding(rank, gpu, *share, how))
    return bindings


def choose_bindings(
    option: str, gpus: Sequence[Gpu | None], root: str, place: Started
) -> list[Binding]:
    """Return the bindings of the ranks on this node, by ``--bind``; ValueError if they cannot be.

    A rank that srun or mpirun has bound stays there, and the others' bindings are theirs.
    """
    allowed, count = os.sched_getaffinity(0), len(gpus)
    topology = Topology(root, allowed)
    cores, every = topology.cores(allowed), sum(map(len, topology.numa_cpus.values()))
    if option == "none":
        # the threads are divided, or every rank would start one per core
        threads = max(1, len(cores) // count)
        return [Binding(i, gpu, None, threads, "none") for i, gpu in enumerate(gpus)]
    if option == "auto":
        if not place.adopted or place.by == "torchrun" or len(allowed) == every:
            return auto_bindings(topology, allowed, gpus)
        # mpirun binds to sockets by default: several ranks then share one set of cores
        threads = max(1, len(cores) // -(-len(allowed) * count // every))
        mine = place.local_rank, gpus[place.local_rank], sorted(allowed)
        return [Binding(*mine, threads, f"{place.by}'s")]
    try:
        sets = [parse_cpulist(text) for text in option.split(":")]
    except ValueError as error:
        choices = "choose auto, none, or a CPU list for each local rank, as in 0-11:12-23"
        raise ValueError(f"--bind {option}: {error}; {choices}") from None
    if len(sets) != count or not all(sets):
        raise ValueError(f"--bind {option}: give a CPU list to each of {count} local ranks")
    for rank in [place.local_rank] if place.adopted else range(count):
        if missing := format_cpulist(set(sets[rank]) - allowed):
            why = f"cannot use CPU {missing}; the launcher may use {format_cpulist(allowed)}"
            raise ValueError(f"--bind {option}: local rank {rank} {why}")
    rows = enumerate(zip(gpus, sets, strict=True))
    return [Binding(i, gpu, cpus, len(topology.cores(cpus)), "given") for i, (gpu, cpus) in rows]
