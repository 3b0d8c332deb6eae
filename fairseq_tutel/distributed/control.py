"""Small messages by which ranks compare notes, and the words for a difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def to_device_of(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.Tensor:
    """Move a small control tensor to a device that the group's backend can communicate from."""
    if dist.get_backend(group) == "nccl":
        return tensor.cuda()
    return tensor


def gather_integers(
    values: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """The integers of every rank of a group, in rank order. Collective; as many on each rank."""
    mine = to_device_of(group, torch.tensor(values, dtype=torch.int64))
    size = dist.get_world_size(group)
    everyone = mine.new_empty(size * mine.numel())
    dist.all_gather_into_tensor(everyone, mine, group=group)
    return everyone.view(size, -1).tolist()


def refuse_differences(name: str, values: Sequence[int], first_rank: int = 0) -> None:
    """Compare one setting of ranks ``first_rank``, ``first_rank + 1``, ...

    Raises:
        ValueError: they differ; the message lists the ranks by value.
    """
    ranks_by_value: dict[int, list[int]] = {}
    for rank, value in enumerate(values, start=first_rank):
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) > 1:
        listing = "; ".join(f"{v} on ranks {r}" for v, r in sorted(ranks_by_value.items()))
        raise ValueError(f"MoE ranks disagree on {name}: {listing}")
