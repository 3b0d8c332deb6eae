"""Merge the low-rank updates (LoRA) of a set's experts into their weights."""

from collections.abc import Mapping
from typing import Any

import torch

from .layout import CheckpointError
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
    scale = options[_ALPHA] / options[_RANK]

    def experts(numbers: range) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        tensors, _ = source.experts(numbers, with_optimizer=False)
        return _merged(tensors, scale), {}

    return write_set(
        dst,
        with_options(shared, {_RANK: 0, "moe_expert_dtype": "same"}),
        experts,
        num_experts=source.num_experts,
        num_ranks=source.num_rank_files if source.kind == "set" else None,
        source=source,
        force=force,
    )


def _merged(tensors: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Return weights with their updates added in fp32, in the dtype of the weights."""
    found = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and (a := tensors.get(f"{stem}.lora_A")) is not None:
            b = tensors[f"{stem}.lora_B"]
            merged = torch.addmm(value.float(), b.float(), a.float(), alpha=scale)
            value = merged.to(value.dtype)
        if kind not in ("lora_A", "lora_B"):
            found[name] = value
    return found
