"""Tensors with one owner among the ranks: assignment, broadcast, transfer to the first rank."""

import heapq
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ..world import data_device

_JOINED = 1 << 20  # bytes; smaller tensors travel in one message
_PIECE = 1 << 25  # bytes of one message to the first rank


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each tensor, equal on all ranks; not collective.

    Each tensor, the largest first, goes to the rank with the fewest elements so far.

    >>> share_out([10, 40, 30, 20], ranks=2)
    [0, 0, 1, 1]
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, owner = loads[0]
        owners[index] = owner
        heapq.heapreplace(loads, (load + sizes[index], owner))
    return owners


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor's bytes, [n] uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def broadcast_from_owners_(owned: Mapping[int, Sequence[torch.Tensor]]) -> None:
    """Overwrite tensors in place by those of their owners (rank -> tensors). Collective.

    All ranks pass matching tensors in the same order. Large tensors travel without a copy, the
    small ones of an owner in one message.
    """
    waiting, joined = [], []
    for owner, tensors in owned.items():
        small: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.is_contiguous() and tensor.nbytes >= _JOINED:
                waiting.append(dist.broadcast(as_bytes(tensor), src=owner, async_op=True))
            else:
                small.setdefault(tensor.device, []).append(tensor)
        for parts in small.values():
            together = torch.cat([as_bytes(part.detach().contiguous()) for part in parts])
            waiting.append(dist.broadcast(together, src=owner, async_op=True))
            joined.append((together, parts))
    for work in waiting:
        work.wait()
    for together, parts in joined:
        for part, received in zip(parts, together.split([p.nbytes for p in parts]), strict=True):
            part.detach().copy_(received.clone().view(part.dtype).view(part.shape))


def send_to_first(owner: int, sizes: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
    """Copy an owner's tensors to the first rank, a piece at a time. Collective.

    Pieces are broadcast, because each pair of ranks would need one more connection. ``sizes`` are
    bytes of each tensor, equal on all ranks; ``parts``, results of :func:`as_bytes`, the tensors on
    the owner, their targets on rank 0; unused on other ranks.
    """
    rank = dist.get_rank()
    buffer = torch.empty(
        min(max(sizes, default=0), _PIECE), dtype=torch.uint8, device=data_device()
    )
    for index, size in enumerate(sizes):
        for start in range(0, size, _PIECE):
            piece = buffer[: size - start]
            if rank == owner:
                piece.copy_(parts[index][start : start + _PIECE])
            dist.broadcast(piece, src=owner)
            if rank == 0:
                parts[index][start : start + _PIECE].copy_(piece)
