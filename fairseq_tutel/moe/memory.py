"""Estimate the memory of a training step, and find the free memory of a device.

The planner uses the same formulas (``plan/gpu_memory.py`` explains them).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..ops import ActivationMemory
from .experts import is_fused

_MEMORY_FILE = Path("/proc/meminfo")


@dataclass(frozen=True)
class StepMemory:
    """Memory of a training step on one device; ``str()`` gives one line."""

    kinds: Mapping[str, int]  # bytes by name
    free: int | None  # bytes that can be allocated now; None if unknown
    held: Collection[str] = ()  # names of the kinds that are allocated already

    @property
    def needed(self) -> int:
        """Bytes that the step will allocate."""
        return sum(size for name, size in self.kinds.items() if name not in self.held)

    @property
    def fits(self) -> bool:
        """Whether so many bytes are free; True if unknown."""
        return self.free is None or self.needed <= self.free

    def __str__(self) -> str:
        free = "" if self.free is None else f" of {gib(self.free)} that are free"
        what = "needs" if self.fits else "does NOT fit: it needs"
        return f"a step {what} {gib(self.needed)}{free} ({largest(self.kinds, len(self.kinds))})"


@dataclass(frozen=True)
class RoutedBytes:
    """Bytes that an MoE layer keeps for its backward pass."""

    gate: int  # logits in fp32
    hidden: int  # inputs and outputs of the experts' activation
    shared: int  # the same of the shared expert
    rows: int  # received rows, and outputs, of model width
    again: int  # what was not kept, so that the backward pass computes it again
    working: int  # bytes that the backward pass needs at once beside what is kept


def routed_bytes(
    *,
    tokens: int,
    outputs: int,
    rows: int,
    destinations: int,
    model_dim: int,
    hidden: int,
    hidden_dim: int,
    shared_dim: int,
    element: int,
    memory: ActivationMemory,
    communicates: bool,
    fused: bool = True,
) -> RoutedBytes:
    """Return the bytes for T tokens of this rank.

    ``outputs`` are logits per token; ``rows`` those of the dispatch buffer, each of which goes to
    ``destinations`` ranks; ``hidden`` numbers per row before and after the activation of a whole
    expert, ``hidden_dim`` after it; ``element`` bytes of a number. If rows come from other ranks,
    ``lean`` keeps them. A network that is not ``fused`` keeps rows and outputs and is computed
    again.
    """
    buffer, all_hidden = rows * destinations * element * model_dim, rows * element * hidden
    kept_rows, kept_hidden = 2 * buffer, all_hidden
    if not (memory.outputs or fused):
        kept_hidden = 0
    elif not memory.outputs:
        keeps = memory.hidden
        stored = memory.stored_bytes(element)
        kept_rows = buffer // element * stored if keeps and communicates else 0
        kept_hidden = rows * stored * (hidden - hidden_dim) if keeps else 0
    shared = tokens * 2 * element * shared_dim
    again = 2 * buffer - kept_rows + all_hidden - kept_hidden
    return RoutedBytes(
        gate=tokens * 4 * outputs,
        hidden=kept_hidden,
        shared=shared,
        rows=kept_rows,
        again=again,
        working=max(buffer, all_hidden, shared) + again,
    )


def memory_of_step(layer: Any, num_tokens: int, dtype: torch.dtype | None) -> StepMemory:
    """Estimate a training step through an MoELayer: see its method of this name."""
    params, config, experts = list(layer.parameters()), layer.config, layer.experts
    routed = routed_bytes(
        tokens=num_tokens,
        outputs=config.num_outputs,
        rows=config.dispatch_rows(num_tokens),
        destinations=layer.exchange_choice.parallelism.num_destinations,
        model_dim=layer.model_dim,
        hidden=experts.kept_per_row(layer.model_dim),
        hidden_dim=getattr(experts, "hidden_dim", 0),
        shared_dim=layer.shared_expert.hidden_dim if layer.shared_expert else 0,
        element=(dtype or params[0].dtype).itemsize,
        memory=experts.memory,
        communicates=layer.exchange_choice.communicates,
        fused=is_fused(experts),
    )
    kinds = {
        "weights": sum(param.nbytes for param in params),
        "gradients": sum(param.nbytes for param in params if param.requires_grad),
        "rows sent and received": routed.rows,
        "inside the experts": routed.hidden + routed.shared,
        "logits of the gate": routed.gate,
        "working set of the backward pass": routed.working,
    }
    return StepMemory(kinds, free_memory(params[0].device), held=("weights",))


def gib(size: float) -> str:
    """Write bytes in GiB, or in MiB below 0.1 GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"


def largest(kinds: Mapping[str, int], count: int = 3) -> str:
    """Write the largest kinds and their bytes in words."""
    order = sorted(kinds.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in order[:count] if size)


def free_memory(device: torch.device | str) -> int | None:
    """Return the bytes that can still be allocated; None if unknown.

    On a GPU this includes torch's reserve; on a CPU it is what Linux calls available.
    """
    device = torch.device(device)
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    if device.type != "cpu" or not _MEMORY_FILE.exists():
        return None
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMORY_FILE.read_text(encoding="ascii"))
    return 1024 * int(available[1]) if available else None
