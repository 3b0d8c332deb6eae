"""Small messages that every rank gets from every other, and the error where they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .world import process_world

# (received, mine, group): one tensor for all ranks' parts; torch 2.13 gave it another name
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def control_device(group: dist.ProcessGroup | None = None) -> str:
    """``cuda`` or ``cpu``: where small control tensors of a group live.

    The CPU where the group can communicate from there (gloo, and the default of
    ``init_process_group``, which has a backend for each), so that the GPU need not be waited for.
    """
    return "cuda" if dist.get_backend(group) in ("nccl", "cuda:nccl") else "cpu"


def data_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device whose tensors a group is there for: the GPU where it has a backend for GPUs."""
    on_gpu = "nccl" in dist.get_backend_config(group) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def gather_integers(
    values: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """The integers of every rank of a group, in rank order. Collective; as many on each rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=control_device(group))
    everyone = mine.new_empty(dist.get_world_size(group) * len(values))
    all_gather_tensor(everyone, mine, group=group)
    return everyone.view(-1, len(values)).tolist()


def gather_texts(text: str | None) -> list[str | None]:
    """One short text (or None) of every rank, in rank order, on every rank. Collective.

    What :mod:`fairseq_tutel.checkpoint` needs to raise the error of one rank on all.
    """
    _, world_size = process_world()
    if world_size == 1:
        return [text]
    data = b"" if text is None else b"+" + text.encode()
    sizes = [size for (size,) in gather_integers([len(data)])]
    width = max(1, *sizes)
    mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
    mine = mine.to(control_device())
    rows = mine.new_empty(world_size * width)
    all_gather_tensor(rows, mine)
    texts = [bytes(row[:n].tolist()) for row, n in zip(rows.view(-1, width), sizes, strict=True)]
    return [raw[1:].decode(errors="replace") if raw else None for raw in texts]


def refuse_differences(name: str, values: Sequence[int | str], first_rank: int = 0) -> None:
    """Compare one setting of ranks ``first_rank``, ``first_rank + 1``, ...

    Raises:
        ValueError: they differ; the message lists the ranks by value.
    """
    ranks_by_value: dict[int | str, list[int]] = {}
    for rank, value in enumerate(values, start=first_rank):
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) > 1:
        listing = "; ".join(f"{v} on ranks {r}" for v, r in sorted(ranks_by_value.items()))
        raise ValueError(f"MoE ranks disagree on {name}: {listing}")
