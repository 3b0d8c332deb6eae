"""Cores, NUMA nodes and PCI devices as Linux describes them under /sys.

Every reader takes the file system's root, so that a test can hand in a made-up machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def parse_cpulist(text: str) -> list[int]:
    """CPU numbers of Linux's list format: ``0-3,8`` is [0, 1, 2, 3, 8]; an empty text is []."""
    cpus: list[int] = []
    for item in text.replace("\n", "").split(","):
        item = item.strip()
        if not item:
            continue
        low, dash, high = item.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) < int(low)):
            raise ValueError(f"CPU list {text.strip()!r}: cannot read {item!r}")
        cpus.extend(range(int(low), int(high if dash else low) + 1))
    return sorted(set(cpus))


def format_cpulist(cpus: Iterable[int]) -> str:
    """The inverse of ``parse_cpulist``, with runs written as ranges."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def normalise_pci_id(pci_id: str) -> str:
    """``00000000:3B:00.0`` (nvidia-smi) or ``3b:00.0`` as /sys spells it: ``0000:3b:00.0``."""
    parts = pci_id.strip().lower().split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    if len(parts) != 3:
        raise ValueError(f"{pci_id!r} is not a PCI address (domain:bus:device.function)")
    return f"{int(parts[0], 16):04x}:{parts[1]}:{parts[2]}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # absent, or hidden from this container
        return None


@dataclass(frozen=True)
class Topology:
    """One machine: which CPUs a NUMA node has, and which CPUs share a core.

    numa_cpus: CPUs by NUMA node number; nodes without CPUs (memory only) are left out.
    core_of: for each CPU the lowest CPU number of its core (its hardware threads share it).
    """

    numa_cpus: dict[int, tuple[int, ...]]
    core_of: dict[int, int]
    root: Path

    @classmethod
    def read(cls, root: str | Path = "/", fallback_cpus: Iterable[int] = ()) -> Topology:
        """Reads ``root``/sys. Where that lists nothing, all ``fallback_cpus`` are NUMA node 0."""
        root = Path(root)
        numa_cpus: dict[int, tuple[int, ...]] = {}
        for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
            cpus = parse_cpulist(_read(folder / "cpulist") or "")
            if cpus:
                numa_cpus[int(folder.name[4:])] = tuple(cpus)
        if not numa_cpus:
            numa_cpus = {0: tuple(sorted(fallback_cpus))}
        core_of = {}
        for cpus in numa_cpus.values():
            for cpu in cpus:
                base = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
                siblings = _read(base / "thread_siblings_list") or _read(base / "core_cpus_list")
                core_of[cpu] = min(parse_cpulist(siblings or "") or [cpu])
        return cls(numa_cpus, core_of, root)

    def node_of_cpu(self, cpu: int) -> int | None:
        return next((node for node, cpus in self.numa_cpus.items() if cpu in cpus), None)

    def node_of_pci(self, pci_id: str | None) -> int | None:
        """NUMA node of a PCI device; None where sysfs has none (no file, or -1)."""
        if pci_id is None:
            return None
        text = _read(self.root / "sys/bus/pci/devices" / normalise_pci_id(pci_id) / "numa_node")
        node = int(text) if text else -1
        if node in self.numa_cpus:
            return node
        # On a machine with one NUMA node the kernel writes -1, and there is only one answer.
        return next(iter(self.numa_cpus)) if len(self.numa_cpus) == 1 else None

    def cores(self, cpus: Iterable[int]) -> list[list[int]]:
        """``cpus`` grouped into cores, in the order of their lowest CPU number."""
        groups: dict[int, list[int]] = {}
        for cpu in sorted(cpus):
            groups.setdefault(self.core_of.get(cpu, cpu), []).append(cpu)
        return [groups[core] for core in sorted(groups)]
