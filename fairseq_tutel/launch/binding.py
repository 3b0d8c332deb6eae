"""Cores for every rank of this node: the machine's topology, a choice, its application.

Memory follows the cores: Linux takes it from the node that first writes to it. Readers of /sys take
the file system's root, so that a test can hand in a made-up machine.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..command_line import columns
from .devices import Gpu
from .placement import Placement


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
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent, or hidden from this container
        return ""


@dataclass(frozen=True)
class Topology:
    """CPUs of each NUMA node of a machine, and CPUs that share a core."""

    numa_cpus: dict[int, tuple[int, ...]]  # by node number, without nodes of memory only
    core_of: dict[int, int]  # for each CPU the lowest number of its core's hardware threads
    root: Path

    @classmethod
    def read(cls, root: str | Path = "/", fallback_cpus: Iterable[int] = ()) -> Topology:
        """Read ``root``/sys. If it lists nothing, all ``fallback_cpus`` are NUMA node 0."""
        root = Path(root)
        folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
        found = {int(f.name[4:]): tuple(parse_cpulist(_read(f / "cpulist"))) for f in folders}
        numa_cpus = {node: cpus for node, cpus in found.items() if cpus}
        numa_cpus = numa_cpus or {0: tuple(sorted(fallback_cpus))}
        core_of = {}
        for cpu in (cpu for cpus in numa_cpus.values() for cpu in cpus):
            base = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            siblings = _read(base / "thread_siblings_list") or _read(base / "core_cpus_list")
            core_of[cpu] = min(parse_cpulist(siblings) or [cpu])
        return cls(numa_cpus, core_of, root)

    def node_of(self, gpu: Gpu | None) -> int | None:
        """Return the NUMA node of a GPU; None if sysfs has none (no file, or -1)."""
        if gpu is None or gpu.pci_id is None:
            return None
        node = int(_read(self.root / "sys/bus/pci/devices" / gpu.pci_id / "numa_node") or -1)
        if node in self.numa_cpus:
            return node
        # On a machine with one NUMA node the kernel writes -1, and there is only one answer.
        return next(iter(self.numa_cpus)) if len(self.numa_cpus) == 1 else None

    def cores(self, cpus: Iterable[int]) -> list[list[int]]:
        """Group ``cpus`` into cores, in the order of their lowest CPU number."""
        groups: dict[int, list[int]] = {}
        for cpu in sorted(cpus):
            groups.setdefault(self.core_of.get(cpu, cpu), []).append(cpu)
        return [groups[core] for core in sorted(groups)]


@dataclass(frozen=True)
class RankBinding:
    """Cores, threads and GPU of one rank."""

    local_rank: int
    gpu: Gpu | None
    cpus: tuple[int, ...] | None  # None: anywhere
    threads: int | str  # OMP_NUM_THREADS, by default the number of cores
    note: str = ""  # why a rank is bound in another way than usual
    chosen: str = "auto"  # who chose the cores: "auto", or "given" by --bind

    def describe(self) -> str:
        """Return the binding in one line, for a benchmark's record."""
        note = f" ({self.note})" if self.note else ""
        if self.cpus is None:
            return "none"
        return f"{self.chosen} cores={format_cpulist(self.cpus)}{note}"


def _slice(topology: Topology, cpus: Sequence[int], index: int, count: int):
    """Return part ``index`` of ``count`` of ``cpus`` in whole cores, and its number of threads."""
    cores = sorted(topology.cores(cpus), key=lambda core: min(map(cpus.index, core)))
    if len(cores) < count:  # the scheduler balances better than any fixed choice
        return tuple(sorted(cpus)), 1
    low, high = index * len(cores) // count, (index + 1) * len(cores) // count
    return tuple(sorted(cpu for core in cores[low:high] for cpu in core)), high - low


def auto_bindings(
    topology: Topology, allowed: Iterable[int], gpus: Sequence[Gpu | None]
) -> list[RankBinding]:
    """Return one binding per local rank, to the cores in ``allowed``.

    A rank with a GPU gets its share of the cores of that GPU's NUMA node, as with torchrun's
    ``--numa-binding exclusive``. Others get equal slices of whole cores, node by node.
    """
    allowed = set(allowed)
    # in the order of NUMA nodes, so that a slice straddles two of them as rarely as possible
    by_node = [cpu for node in sorted(topology.numa_cpus) for cpu in topology.numa_cpus[node]]
    ordered = [cpu for cpu in by_node if cpu in allowed] or sorted(allowed)
    nodes = [topology.node_of(gpu) for gpu in gpus]
    bindings = []
    for local_rank, (gpu, node) in enumerate(zip(gpus, nodes, strict=True)):
        own = sorted(allowed & set(topology.numa_cpus[node])) if node is not None else []
        note = ""
        if own:
            # a starter may hide the others' GPUs: they could be on the same node
            peers = [i for i, other in enumerate(nodes) if other in (node, None)]
            cpus, threads = _slice(topology, own, peers.index(local_rank), len(peers))
        else:
            if gpu is not None:
                unknown = "NUMA node of the GPU unknown"
                note = unknown if node is None else f"no allowed core in NUMA node {node}"
            cpus, threads = _slice(topology, ordered, local_rank, len(gpus))
        bindings.append(RankBinding(local_rank, gpu, cpus, threads, note))
    return bindings


def given_bindings(
    option: str,
    topology: Topology,
    allowed: set[int],
    gpus: Sequence[Gpu | None],
    mine: Iterable[int],
) -> list[RankBinding]:
    """Return the bindings that ``--bind 0-11:12-23`` names; ValueError if they do not fit."""
    try:
        sets = [parse_cpulist(text) for text in option.split(":")]
    except ValueError as error:
        choices = "choose auto, none, or a CPU list for each local rank, as in 0-11:12-23"
        raise ValueError(f"--bind {option}: {error}; {choices}") from None
    if len(sets) != len(gpus) or not all(sets):
        raise ValueError(f"--bind {option}: give a CPU list to each of {len(gpus)} local ranks")
    for rank in mine:
        if missing := set(sets[rank]) - allowed:
            where = f"{format_cpulist(missing)}; the launcher may use {format_cpulist(allowed)}"
            raise ValueError(f"--bind {option}: local rank {rank} cannot use CPU {where}")
    return [
        RankBinding(i, gpu, tuple(cpus), len(topology.cores(cpus)), chosen="given")
        for i, (gpu, cpus) in enumerate(zip(gpus, sets, strict=True))
    ]


def choose_bindings(
    option: str, placement: Placement, gpus: Sequence[Gpu | None], root: str
) -> list[RankBinding]:
    """Return the bindings of the ranks on this node; of this rank alone if its starter bound it."""
    allowed, rank = set(os.sched_getaffinity(0)), placement.local_rank
    topology = Topology.read(root, fallback_cpus=allowed)
    cores, every = topology.cores(allowed), sum(map(len, topology.numa_cpus.values()))
    if option == "none":
        # the threads are divided, or every rank would start one per core
        threads = max(1, len(cores) // len(gpus))
        return [RankBinding(i, gpu, None, threads) for i, gpu in enumerate(gpus)]
    if option != "auto":
        mine = [rank] if placement.adopted else range(len(gpus))
        return given_bindings(option, topology, allowed, gpus, mine)
    own = gpus[rank]
    if placement.adopted and placement.is_task and len(allowed) < every:
        # mpirun binds to sockets by default: several ranks then share one set of cores
        sharers = -(-len(allowed) * len(gpus) // every)
        threads, note = max(1, len(cores) // sharers), f"bound by {placement.source}"
        return [RankBinding(rank, own, tuple(sorted(allowed)), threads, note)]
    return auto_bindings(topology, allowed, gpus)


def format_table(bindings: Sequence[RankBinding], host: str) -> str:
    """Return the bindings of one node as a table."""
    rows = [("local rank", "gpu", "pci", "cores", "threads", "")]
    for b in bindings:
        gpu, pci = ("-", "-") if b.gpu is None else (str(b.gpu.index), b.gpu.pci_id or "-")
        cores = "any" if b.cpus is None else format_cpulist(b.cpus)
        rows.append((str(b.local_rank), gpu, pci, cores, str(b.threads), b.note))
    return "\n".join([f"binding of the ranks on {host}:", *(f"  {row}" for row in columns(rows))])


def apply_binding(binding: RankBinding) -> None:
    """Bind the calling process; if the machine refuses, report it and run unbound, but slower."""
    try:
        if binding.cpus is not None:
            os.sched_setaffinity(0, binding.cpus)
    except OSError as error:
        sys.stderr.write(f"launch: local rank {binding.local_rank} is not bound: {error}\n")
