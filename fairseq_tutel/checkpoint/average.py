"""Average the weights of several checkpoints of one run, experts included."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .layout import CheckpointError, check_same, form
from .reader import read_set
from .state import MODEL, options_of
from .store import refuse_target, write_set


def average(sources: Sequence[str], dst: str, *, force: bool = False) -> str:
    """Write a set with the mean of each weight, without optimizer state; return its path.

    Means are taken in fp32. Options, counters and other entries, and the number of ranks, are those
    of the last source.

    Args:
        sources: sets or merged files with the same parameters, else CheckpointError.
        dst: X.pt of the new set.
        force: replace what ``dst`` names.
    """
    for path in sources:
        refuse_target(dst, path, force)
    readers = [read_set(path) for path in sources]
    last = readers[-1]
    states = [reader.shared_state(with_optimizer=False) for reader in readers]
    if any(options_of(state).get("moe_lora_rank") for state in states):
        raise CheckpointError(f"{dst}: updates of LoRA have no mean: run merge-lora on each first")
    for path, reader in zip(sources, readers, strict=True):
        if reader.num_experts != last.num_experts:
            found = f"{reader.num_experts} experts, and {sources[-1]} {last.num_experts}"
            raise CheckpointError(f"{path}: has {found}")

    def experts(numbers: range) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        parts = [reader.experts(numbers, with_optimizer=False)[0] for reader in readers]
        return _mean(parts, sources), {}

    return write_set(
        dst,
        {**states[-1], MODEL: _mean([state[MODEL] for state in states], sources)},
        experts,
        num_experts=last.num_experts,
        num_ranks=last.num_rank_files if last.kind == "set" else None,
        source=last,
        force=force,
    )


def _mean(parts: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> dict[str, Any]:
    """Return the mean of tensors by name; what is no floating-point tensor is the last one's."""
    forms = [{name: form(value) for name, value in part.items()} for part in parts]
    for path, found in zip(sources, forms, strict=True):
        check_same(found, forms[-1], path, sources[-1])
    means = {}
    for name, value in parts[-1].items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            total = sum((part[name].float() for part in parts), torch.zeros(value.shape))
            value = (total / len(parts)).to(value.dtype)
        means[name] = value
    return means
