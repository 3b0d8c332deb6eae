"""Rows of the send buffer in the order in which an exchange wants the parts of the ranks."""

from __future__ import annotations

import torch

from ..distributed import Exchange
from .routing import Routing


def rows_for_exchange(routing: Routing, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
    """The index arrays with which dispatch writes the rows in the exchange's send order.

    Only indices are computed anew, so that no row is copied for the order's sake; combine reads
    what comes back with the same arrays.

    Returns:
        ``dest_row_TK`` and ``src_pair_R`` of the routing, for parts in ``exchange.send_order``.
    """
    if exchange.send_order is None:
        return routing.dest_row_TK, routing.src_pair_R
    local = exchange.groups.num_local_experts
    order_W, part_W = exchange.send_order_on(routing.dest_row_TK.device)
    if routing.padded:
        rank_W = torch.arange(len(part_W), device=part_W.device)
        shift_W = (part_W - rank_W) * (local * routing.capacity)
    else:
        num_rows_W = routing.num_kept_per_expert_E.view(-1, local).sum(1)
        first_W = num_rows_W.cumsum(0) - num_rows_W
        num_rows_P = num_rows_W[order_W]
        shift_W = (num_rows_P.cumsum(0) - num_rows_P)[part_W] - first_W
    shift_TK = shift_W.to(torch.int32)[(routing.expert_TK.clamp(min=0) // local).long()]
    dest_row_TK = torch.where(routing.kept_TK, routing.dest_row_TK + shift_TK, -1)
    return dest_row_TK, _source_of_rows(dest_row_TK, routing.src_pair_R.shape[0])


def _source_of_rows(dest_row_TK, num_rows):
    """int32 [num_rows], the pair in each row, -1 in unused ones; dropped pairs share a row more."""
    pair = torch.arange(dest_row_TK.numel(), dtype=torch.int32, device=dest_row_TK.device)
    row = torch.where(dest_row_TK < 0, num_rows, dest_row_TK).flatten().long()
    return pair.new_full((num_rows + 1,), -1).scatter_(0, row, pair)[:num_rows]
