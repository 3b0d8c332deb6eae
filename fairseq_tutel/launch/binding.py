"""Cores and memory for every rank of this node: chosen from the topology, then applied."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..command_line import columns
from .devices import Gpu
from .topology import Topology, format_cpulist, parse_cpulist

_MPOL_BIND = 2  # linux/mempolicy.h
_SYS_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}


@dataclass(frozen=True)
class RankBinding:
    """cpus: where the rank may run (None: anywhere); numa: NUMA nodes of its memory (None: any);
    threads: OMP_NUM_THREADS by the number of cores; users_threads: its value in the environment,
    which wins, or None; note: why a rank is bound in another way than usual."""

    local_rank: int
    gpu: Gpu | None
    cpus: tuple[int, ...] | None
    numa: tuple[int, ...] | None
    threads: int
    note: str = ""
    users_threads: str | None = None

    @property
    def omp_num_threads(self) -> str:
        return str(self.threads) if self.users_threads is None else self.users_threads

    def describe(self, option: str) -> str:
        """The effect of --bind ``option`` in one line, for a benchmark's record."""
        if self.cpus is None:
            return "none"
        memory = "any" if self.numa is None else format_cpulist(self.numa)
        name = "auto" if option == "auto" else "explicit"
        note = f" ({self.note})" if self.note else ""
        return f"{name} cores={format_cpulist(self.cpus)} memory={memory}{note}"


def _slice(topology: Topology, cpus: Sequence[int], index: int, count: int):
    """Part ``index`` of ``count`` of ``cpus`` in whole cores, and the threads it should run.

    Cores are dealt in the order of ``cpus``. With fewer cores than parts everyone shares all of
    them: the scheduler then balances better than any fixed choice.
    """
    position = {cpu: i for i, cpu in enumerate(cpus)}
    cores = sorted(topology.cores(cpus), key=lambda core: min(position[cpu] for cpu in core))
    if len(cores) < count:
        return tuple(sorted(cpus)), 1
    low, high = index * len(cores) // count, (index + 1) * len(cores) // count
    return tuple(sorted(cpu for core in cores[low:high] for cpu in core)), high - low


def _numa_of(topology: Topology, cpus: Iterable[int]) -> tuple[int, ...] | None:
    """NUMA nodes of ``cpus``; None where that is every node, as there is nothing to restrict."""
    nodes = {topology.node_of_cpu(cpu) for cpu in cpus} - {None}
    return tuple(sorted(nodes)) if 0 < len(nodes) < len(topology.numa_cpus) else None


def auto_bindings(
    topology: Topology, allowed: Iterable[int], gpus: Sequence[Gpu | None]
) -> list[RankBinding]:
    """One binding per local rank; ``gpus`` gives each rank's GPU, or None for a rank on the CPU.

    A rank with a GPU gets its share of the cores of that GPU's NUMA node, as far as ``allowed``
    (this process' CPU set) has them, and that node's memory. Ranks without a GPU get equal
    slices of ``allowed``, hardware threads of one core together, node by node.
    """
    allowed = sorted(set(allowed))
    node_of = [topology.node_of_pci(gpu.pci_id) if gpu else None for gpu in gpus]
    local_cpus = {
        node: sorted(set(topology.numa_cpus[node]) & set(allowed)) for node in set(node_of) - {None}
    }
    # In the order of NUMA nodes, so that a slice straddles two of them as rarely as possible.
    by_node = [cpu for node in sorted(topology.numa_cpus) for cpu in topology.numa_cpus[node]]
    ordered = [cpu for cpu in by_node if cpu in set(allowed)] or allowed
    bindings = []
    for local_rank, gpu in enumerate(gpus):
        node, note = node_of[local_rank], ""
        if node is not None and local_cpus[node]:
            peers = [i for i, other in enumerate(node_of) if other == node]
            cpus, threads = _slice(topology, local_cpus[node], peers.index(local_rank), len(peers))
        else:
            if gpu is not None:
                note = (
                    "NUMA node of the GPU unknown"
                    if node is None
                    else f"no allowed core in NUMA node {node}"
                )
            cpus, threads = _slice(topology, ordered, local_rank, len(gpus))
        bindings.append(RankBinding(local_rank, gpu, cpus, _numa_of(topology, cpus), threads, note))
    return bindings


def no_bindings(topology: Topology, allowed: Iterable[int], gpus) -> list[RankBinding]:
    """Nothing is bound; the threads are divided, or every rank would start one per core."""
    threads = max(1, len(topology.cores(allowed)) // len(gpus))
    return [RankBinding(i, gpu, None, None, threads) for i, gpu in enumerate(gpus)]


def parse_explicit(text: str, num_ranks: int) -> list[tuple[int, ...]]:
    """CPU sets from ``--bind``: one per rank.

    ``0-3,4-7``: with as many comma-separated items as ranks, one item per rank. Longer lists are
    separated by ``;`` or ``:``, as ``0-3,16-19:4-7,20-23``. ``0xff,0xff00``: masks in hexadecimal.
    """
    if not re.search(r"\d", text):
        raise ValueError(
            f"--bind {text}: neither auto nor none, nor the cores of each rank, as in 0-3:4-7"
        )
    rough = text.replace(";", ":").split(":")
    parts = rough if len(rough) > 1 or num_ranks == 1 else text.split(",")
    if len(parts) != num_ranks:
        raise ValueError(
            f"--bind {text}: {len(parts)} sets of CPUs for {num_ranks} ranks on this node "
            "(separate the ranks by ':' where a set itself has a comma)"
        )
    sets = []
    for part in parts:
        if part.strip().lower().startswith("0x"):
            try:
                mask = int(part, 16)
            except ValueError:
                raise ValueError(f"--bind {text}: {part!r} is not a mask") from None
            cpus = [i for i in range(mask.bit_length()) if mask >> i & 1]
        else:
            cpus = parse_cpulist(part)
        if not cpus:
            raise ValueError(f"--bind {text}: {part!r} names no CPU")
        sets.append(tuple(cpus))
    return sets


def explicit_bindings(
    topology: Topology, allowed: Iterable[int], gpus: Sequence[Gpu | None], text: str
) -> list[RankBinding]:
    """The user's CPU sets; memory follows them where they stay within some NUMA nodes."""
    allowed = set(allowed)
    bindings = []
    for local_rank, cpus in enumerate(parse_explicit(text, len(gpus))):
        outside = sorted(set(cpus) - allowed)
        if outside:
            raise ValueError(
                f"--bind {text}: CPUs {format_cpulist(outside)} of local rank {local_rank} are "
                f"not among those this process may use ({format_cpulist(allowed)})"
            )
        threads = len(topology.cores(cpus))
        bindings.append(
            RankBinding(local_rank, gpus[local_rank], cpus, _numa_of(topology, cpus), threads)
        )
    return bindings


def format_table(bindings: Sequence[RankBinding], host: str) -> str:
    """The bindings of one node as a compact table."""
    rows = [("local rank", "gpu", "pci", "cores", "memory node", "threads", "")]
    for b in bindings:
        rows.append(
            (
                str(b.local_rank),
                "-" if b.gpu is None else str(b.gpu.index),
                "-" if b.gpu is None or b.gpu.pci_id is None else b.gpu.pci_id,
                "any" if b.cpus is None else format_cpulist(b.cpus),
                "any" if b.numa is None else format_cpulist(b.numa),
                b.omp_num_threads + ("" if b.users_threads is None else " (from the environment)"),
                b.note,
            )
        )
    lines = [f"  {line}" for line in columns(rows)]
    return "\n".join([f"binding of the ranks on {host}:", *lines])


def bind_memory(nodes: Sequence[int]) -> None:
    """Restricts the memory of this process and its children to NUMA ``nodes``.

    What ``numactl --membind`` does (set_mempolicy(2) with MPOL_BIND), without needing numactl.
    Raises OSError where the kernel refuses.
    """
    number = _SYS_SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"no number of set_mempolicy is known for {platform.machine()}")
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    words = max(nodes) // bits + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // bits] |= 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads maxnode - 1 bits, hence one more than the mask has.
    if libc.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(words * bits + 1)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"set_mempolicy to NUMA nodes {list(nodes)}: {os.strerror(error)}")


def apply_binding(binding: RankBinding) -> None:
    """Binds the calling process. A refusal is reported and the rank runs unbound: slower, but
    not wrong, and containers do refuse set_mempolicy."""
    try:
        if binding.cpus is not None:
            os.sched_setaffinity(0, binding.cpus)
        if binding.numa is not None:
            bind_memory(binding.numa)
    except OSError as error:
        sys.stderr.write(f"launch: local rank {binding.local_rank} is not fully bound: {error}\n")


def cpuset(allowed: Iterable[int], topology: Topology) -> set[int]:
    """CPUs this process could be given: ``allowed`` plus whatever the kernel grants when asked.

    An affinity mask set by a starter (mpirun binds by default) can be widened again; a cpuset
    (container, SLURM's cgroup) cannot, so the kernel's answer distinguishes the two.
    """
    allowed = set(allowed)
    every = {cpu for cpus in topology.numa_cpus.values() for cpu in cpus} | allowed
    try:
        os.sched_setaffinity(0, every)
        granted = os.sched_getaffinity(0)
    except OSError:
        return allowed
    os.sched_setaffinity(0, allowed)
    return set(granted)
