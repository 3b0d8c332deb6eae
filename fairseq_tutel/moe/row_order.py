"""Rows of the send buffer in the order in which an exchange wants them: by chunk, then by part."""

from __future__ import annotations

import torch

from ..distributed import Exchange, chunk_edges
from .routing import Routing


def rows_for_exchange(
    routing: Routing, exchange: Exchange, degree: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The index arrays with which dispatch writes the rows as they will be sent.

    Only indices are computed anew, so that no row is copied for the order's sake; combine reads
    what comes back with the same arrays.

    Args:
        routing: its rows are ordered by expert.
        exchange: parts are in its send order, local experts in order within a part.
        degree: number of chunks, each of which holds some of every expert's rows
            (:func:`~fairseq_tutel.distributed.chunk_edges`); the rows of a chunk are neighbours.

    Returns:
        ``dest_row_TK`` and ``src_pair_R`` of the routing, for that order.
    """
    if degree == 1 and exchange.send_order is None:
        return routing.dest_row_TK, routing.src_pair_R
    num_rows_E = routing.num_kept_per_expert_E.to(torch.int64)
    if routing.padded:
        num_rows_E = torch.full_like(num_rows_E, routing.capacity)
    edges_DE = chunk_edges(num_rows_E, degree)  # with the end of the last chunk
    shift_DE = _begins(edges_DE.diff(dim=0), exchange) - edges_DE[:-1]
    kept_TK = routing.kept_TK
    expert_TK = routing.expert_TK.clamp(min=0).long()
    begin_E = num_rows_E.cumsum(0) - num_rows_E
    slot_TK = torch.where(kept_TK, routing.dest_row_TK - begin_E[expert_TK], 0)
    # slot s of n is in the last chunk c with n * c // d <= s
    chunk_TK = ((slot_TK + 1) * degree - 1) // num_rows_E.clamp(min=1)[expert_TK]
    row_TK = slot_TK + shift_DE[chunk_TK.clamp(max=degree - 1), expert_TK]
    dest_row_TK = torch.where(kept_TK, row_TK, -1).to(torch.int32)
    return dest_row_TK, source_of_rows(dest_row_TK, routing.src_pair_R.shape[0])


def _begins(size_DE, exchange):
    """First row of every (chunk, expert): by chunk, by part, by local expert."""
    local = exchange.groups.num_local_experts
    if exchange.send_order is None:
        return (size_DE.flatten().cumsum(0) - size_DE.flatten()).view(size_DE.shape)
    order_W, part_W = exchange.send_order_on(size_DE.device)
    within = torch.arange(local, device=size_DE.device)
    order_E = (order_W[:, None] * local + within).flatten()
    place_E = (part_W[:, None] * local + within).flatten()
    size = size_DE[:, order_E].flatten()
    return (size.cumsum(0) - size).view(size_DE.shape)[:, place_E]


def source_of_rows(dest_row_TK, num_rows):
    """int32 [num_rows], the pair in each row, -1 in unused ones; dropped pairs share a row more."""
    pair = torch.arange(dest_row_TK.numel(), dtype=torch.int32, device=dest_row_TK.device)
    row = torch.where(dest_row_TK < 0, num_rows, dest_row_TK).flatten().long()
    return pair.new_full((num_rows + 1,), -1).scatter_(0, row, pair)[:num_rows]
