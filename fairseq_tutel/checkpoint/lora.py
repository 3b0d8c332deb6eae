"""Merge the low-rank updates (LoRA) of a set's experts into their weights."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .layout import CheckpointError, form
from .reader import read_set
from .state import options_of, with_options
from .store import refuse_target, write_set

_RANK, _ALPHA = "moe_lora_rank", "moe_lora_alpha"


def merge_lora(src: str, dst: str, *, force: bool = False) -> str:
    """Write a set whose experts' weights contain their updates, without optimizer state.

    Args:
        src: a set or merged file of a run with ``--moe-lora-rank``, else CheckpointError.
        dst: X.pt of the new set, for as many ranks; it is returned.
        force: replace what ``dst`` names.
    """
    refuse_target(dst, src, force)
    source = read_set(src)
    shared = source.shared_state(with_optimizer=False)
    options = options_of(shared)
    if not options.get(_RANK) or options.get(_ALPHA) is None:
        raise CheckpointError(f"{src}: has no LoRA; --moe-lora-rank trains some")
    alpha = options[_ALPHA]
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{src}: {_ALPHA} {alpha!r} is no finite number")

    def experts(numbers: range) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        tensors, _ = source.experts(numbers, with_optimizer=False)
        return _merged(tensors, options[_RANK], alpha / options[_RANK], src), {}

    return write_set(
        dst,
        with_options(shared, {_RANK: 0, "moe_expert_dtype": "same"}),
        experts,
        num_experts=source.num_experts,
        num_ranks=source.num_rank_files if source.kind == "set" else None,
        source=source,
        force=force,
    )


def _merged(tensors: Mapping[str, Tensor], rank: int, scale: float, src: str) -> dict[str, Tensor]:
    """Return weights with their updates added in fp32, in the dtype of the weights."""
    merged = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        a, b = (tensors.get(f"{stem}.lora_{part}") for part in "AB")
        if kind not in ("weight", "lora_A", "lora_B") or a is b is None:
            merged[name] = value
            continue
        parts = {"weight": tensors.get(f"{stem}.weight"), "lora_A": a, "lora_B": b}
        _check_update(parts, rank, f"{src}: {stem}")
        if kind == "weight":
            total = torch.addmm(value.float(), b.float(), a.float(), alpha=scale)
            merged[name] = total.to(value.dtype)
    return merged


def _check_update(tensors: Mapping[str, Tensor | None], rank: int, stem: str) -> None:
    """Raise CheckpointError unless a weight [A, B] has an update [A, rank] times [rank, B]."""
    missing = [f"{stem}.{name}" for name, value in tensors.items() if value is None]
    if missing:
        raise CheckpointError(f"{missing[0]}: is missing, and the update of LoRA needs it")
    rows, columns = (*tensors["weight"].shape, 0, 0)[:2]
    wanted = {"weight": (rows, columns), "lora_A": (rank, columns), "lora_B": (rows, rank)}
    for name, shape in wanted.items():
        if tensors[name].shape != shape or not tensors[name].is_floating_point():
            raise CheckpointError(
                f"{stem}.{name}: is {form(tensors[name])}, and --moe-lora-rank {rank} needs "
                f"{list(shape)} of floating point"
            )
