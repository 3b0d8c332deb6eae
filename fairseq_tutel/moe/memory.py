"""Memory of a training step on paper, beside what is free, and what to say where it ran out.

    layer.memory_of_step(tokens)        what a step through one layer needs: ``StepMemory``
    print(layer.memory_of_step(4096))   in one line, with what is free
    free_memory(device)                 bytes that can still be allocated there

The formulas are the planner's (``plan/memory.py`` explains them, and takes them from here): what
autograd keeps between forward and backward pass, and what the backward pass has at work beside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_GIB = 2**30
_MEMORY_FILE = Path("/proc/meminfo")


@dataclass(frozen=True)
class RoutedBytes:
    """What an MoE layer keeps for its backward pass, in bytes, without attention and the like."""

    gate: int  # logits in fp32
    hidden: int  # inputs and outputs of the experts' activation
    shared: int  # of the shared expert
    buffer: int  # of rows of model width; two are kept: those received, and the outputs

    @property
    def working(self) -> int:
        """That the backward pass needs at once beside what is kept."""
        return max(self.buffer, self.hidden, self.shared)


def routed_bytes(
    *,
    tokens: int,
    outputs: int,
    rows: int,
    destinations: int,
    model_dim: int,
    hidden: int,
    shared_dim: int,
    element: int,
) -> RoutedBytes:
    """Of T tokens of this rank.

    Args:
        outputs: of the gate, E + N.
        rows: R, of the dispatch buffer (:meth:`~fairseq_tutel.config.MoEConfig.dispatch_rows`).
        destinations: ranks that each row goes to.
        hidden: numbers that a whole expert keeps of a row.
        shared_dim: hidden dimension of the shared expert, or 0.
        element: bytes of a number.
    """
    return RoutedBytes(
        gate=tokens * 4 * outputs,
        hidden=rows * element * hidden,
        shared=tokens * 2 * element * shared_dim,
        buffer=rows * destinations * element * model_dim,
    )


@dataclass(frozen=True)
class StepMemory:
    """What a training step needs on one device, and what is free there; text: one line."""

    kinds: Mapping[str, int]  # name -> bytes
    free: int | None  # bytes that can be allocated now; None where it is unknown
    held: Collection[str] = ()  # kinds that are allocated already

    @property
    def needed(self) -> int:
        """Bytes that the step will allocate."""
        return sum(size for name, size in self.kinds.items() if name not in self.held)

    @property
    def fits(self) -> bool:
        """Whether so much is free, as far as it is known."""
        return self.free is None or self.needed <= self.free

    def __str__(self) -> str:
        free = "" if self.free is None else f" of {gib(self.free)} that are free"
        what = "needs" if self.fits else "does NOT fit: it needs"
        return f"a step {what} {gib(self.needed)}{free} ({largest(self.kinds, len(self.kinds))})"


def gib(size: float) -> str:
    """Bytes in GiB; in MiB below a tenth."""
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB / 10 else f"{size / 2**20:,.1f} MiB"


def largest(kinds: Mapping[str, int], count: int = 3) -> str:
    """The largest kinds and their bytes, in words."""
    order = sorted(kinds.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in order[:count] if size)


def free_memory(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated: of a GPU, with what torch holds in reserve; of a CPU, what
    Linux calls available; None where it is unknown.
    """
    device = torch.device(device)
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    if device.type != "cpu" or not _MEMORY_FILE.exists():
        return None
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMORY_FILE.read_text(encoding="ascii"))
    return available and 1024 * int(available[1])
