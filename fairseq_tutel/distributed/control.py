"""Small messages by which ranks compare notes, and the words for a difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def control_device(group: dist.ProcessGroup | None = None) -> str:
    """``cuda`` or ``cpu``: where small control tensors of a group live.

    The CPU where the group can talk from there (gloo, and the default of ``init_process_group``,
    which has a backend for each), so that the GPU need not be waited for.
    """
    return "cuda" if dist.get_backend(group) in ("nccl", "cuda:nccl") else "cpu"


def gather_integers(
    values: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """The integers of every rank of a group, in rank order. Collective; as many on each rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=control_device(group))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone).tolist()


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
