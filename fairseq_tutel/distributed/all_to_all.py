"""Differentiable exchange of expert rows between the ranks of one group.

The gradient of an all-to-all is the all-to-all in the other direction. In a simulation (one process
plays one rank of many) each exchange, that of the gradients too, is a local copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .groups import ExpertParallelGroups


class _AllToAll(torch.autograd.Function):
    """Rows to ranks; splits None means equal parts."""

    @staticmethod
    def forward(ctx, rows, group, send_splits, recv_splits):
        ctx.group, ctx.send_splits, ctx.recv_splits = group, send_splits, recv_splits
        return _exchange(rows, group, send_splits, recv_splits)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.group, ctx.recv_splits, ctx.send_splits), None, None, None


class _Copy(torch.autograd.Function):
    """A simulated exchange: clone() alone would hand the gradient on without moving it."""

    @staticmethod
    def forward(ctx, rows):
        return rows.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(memory_format=torch.contiguous_format)


def _exchange(rows, group, send_splits, recv_splits):
    rows = rows.contiguous()
    num_received = rows.shape[0] if recv_splits is None else sum(recv_splits)
    received = rows.new_empty((num_received, *rows.shape[1:]))
    dist.all_to_all_single(received, rows, recv_splits, send_splits, group=group)
    return received


def all_to_all(rows: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """Send the w-th of ``ep_size`` equal parts of dim 0 to rank w of the exchange group.

    Args:
        rows: [ep_size * n, ...], the same n on every rank.

    Returns:
        [ep_size * n, ...], the part that rank w sent here at position w.
    """
    if groups.ep_size == 1:
        return rows
    if groups.simulated:
        return _Copy.apply(rows)
    return _AllToAll.apply(rows, groups.ep_group, None, None)


def all_to_all_uneven(
    rows: torch.Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    groups: ExpertParallelGroups,
) -> torch.Tensor:
    """Send ``send_splits[w]`` rows to rank w and receive ``recv_splits[w]`` from it.

    Args:
        rows: [sum(send_splits), ...].

    Returns:
        [sum(recv_splits), ...], ordered by sending rank.
    """
    if groups.ep_size == 1:
        return rows
    if groups.simulated:
        return _Copy.apply(rows)
    return _AllToAll.apply(rows, groups.ep_group, list(send_splits), list(recv_splits))


def exchange_counts(count_E: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """Tell every rank how many rows come to each of its experts.

    Args:
        count_E: [E] int, rows that this rank sends to each expert.

    Returns:
        [ep_size, e] int64, rows that rank w sends to local expert j. In a simulation the local
        experts receive what rank 0 would send to all.
    """
    count_E = count_E.to(torch.int64)
    if groups.communicates:
        received = torch.empty_like(count_E)
        dist.all_to_all_single(received, count_E.contiguous(), group=groups.ep_group)
        count_E = received
    return count_E.view(groups.ep_size, groups.num_local_experts)
