"""What is exchanged at once, and its rows in the order of ranks and in the order of experts.

Without overlap there is one chunk. Chunks are neighbours in the send buffer and sent as they lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..distributed import Exchange
from ..distributed.exchanges import Splits, chunk_edges
from .routing import Routing


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all local experts."""

    rows: torch.Tensor  # [e, N, M], N per expert, unused ones zero (padded), or [R, M] (ragged)
    # int32 [e], end of each expert's rows in a ragged buffer, the rest is unused; None: padded
    offsets: torch.Tensor | None = None


class Chunk(NamedTuple):
    """Rows that are exchanged at once."""

    span: slice  # of the send buffer
    splits: Splits | None  # None for equal ones
    offsets: torch.Tensor | None  # as of ExpertRows
    # what arrived, [n, M] -> rows in the order of the experts, and the inverse; differentiable
    by_expert: Callable[[torch.Tensor], torch.Tensor]
    by_rank: Callable[[torch.Tensor], torch.Tensor]


def arrange(
    routing: Routing, exchange: Exchange, degree: int
) -> tuple[torch.Tensor, torch.Tensor, list[Chunk]]:
    """Cut the rows into chunks. NOTE: with ragged rows between ranks the host reads the counts.

    Padded rows are cut along the capacity, ragged ones along the rows of every (rank, expert); the
    chunks' sizes may differ by one row of each. Returns ``dest_row_TK`` and ``src_pair_R`` for
    dispatch and combine, and ``degree`` chunks, or as many as the capacity has rows.
    """
    dest_row_TK, src_pair_R = rows_for_exchange(routing, exchange, degree)
    if routing.padded:
        return dest_row_TK, src_pair_R, _padded(routing, exchange, degree)
    shared = exchange.algorithm.share_chunks(routing.num_kept_per_expert_E, degree)
    sizes = [src_pair_R.shape[0] if splits is None else sum(splits.sent_P) for _, splits in shared]
    chunks = [
        _ragged(count_Pe, splits, span)
        for (count_Pe, splits), span in zip(shared, _spans(sizes), strict=True)
    ]
    return dest_row_TK, src_pair_R[: sum(sizes)], chunks


def _padded(routing, exchange, degree):
    """Equal parts: rank-major [P, e, C] at the wire, expert-major [e, P*C] at the product."""
    ranks, local = exchange.groups.ep_size, exchange.groups.num_local_experts
    edges = [routing.capacity * number // degree for number in range(degree + 1)]
    capacities = [end - begin for begin, end in itertools.pairwise(edges) if end > begin]

    def chunk(capacity, span):
        def by_expert(rows):
            rows = rows.view(ranks, local, capacity, -1).transpose(0, 1)
            return rows.reshape(local, ranks * capacity, -1)

        def by_rank(out):
            model_dim = out.shape[-1]
            return out.view(local, ranks, capacity, -1).transpose(0, 1).reshape(-1, model_dim)

        return Chunk(span, None, None, by_expert, by_rank)

    spans = _spans([routing.num_experts * capacity for capacity in capacities])
    return [chunk(*each) for each in zip(capacities, spans, strict=True)]


def _ragged(count_Pe, splits, span):
    """Parts of the size that is needed, int [P, e] rows that each rank sends to each expert."""
    ranks, local = count_Pe.shape
    count_e = count_Pe[0] if ranks == 1 else count_Pe.sum(0)
    offsets = count_e.cumsum(0, dtype=torch.int32)
    if ranks == 1 or local == 1:  # both orders are one
        return Chunk(span, splits, offsets, lambda rows: rows, lambda out: out)
    num_rows = span.stop - span.start if splits is None else sum(splits.received_P)
    expert = torch.arange(local, device=count_Pe.device).repeat(ranks)
    expert_R = expert.repeat_interleave(count_Pe.flatten(), output_size=num_rows)
    order = expert_R.argsort(stable=True)
    inverse = order.argsort()
    return Chunk(
        span,
        splits,
        offsets,
        lambda rows: rows.index_select(0, order),
        lambda out: out.index_select(0, inverse),
    )


def _spans(sizes):
    edges = itertools.accumulate(sizes, initial=0)
    return list(itertools.starmap(slice, itertools.pairwise(edges)))


def rows_for_exchange(
    routing: Routing, exchange: Exchange, degree: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The index arrays by which dispatch writes the rows as they will be sent, by chunk and by part
    in the exchange's order, and by which combine reads what comes back.
    """
    if degree == 1 and exchange.algorithm.send_order is None:
        return routing.dest_row_TK, routing.src_pair_R
    num_rows_E = routing.num_kept_per_expert_E.to(torch.int64)
    if routing.padded:
        num_rows_E = torch.full_like(num_rows_E, routing.capacity)
    edges_GE = chunk_edges(num_rows_E, degree)  # with the end of the last chunk
    shift_GE = _begins(edges_GE.diff(dim=0), exchange) - edges_GE[:-1]
    kept_TK = routing.kept_TK
    expert_TK = routing.expert_TK.clamp(min=0).long()
    begin_E = num_rows_E.cumsum(0) - num_rows_E
    slot_TK = torch.where(kept_TK, routing.dest_row_TK - begin_E[expert_TK], 0)
    # slot s of n is in the last chunk c with n * c // d <= s
    chunk_TK = ((slot_TK + 1) * degree - 1) // num_rows_E.clamp(min=1)[expert_TK]
    row_TK = slot_TK + shift_GE[chunk_TK.clamp(max=degree - 1), expert_TK]
    dest_row_TK = torch.where(kept_TK, row_TK, -1).to(torch.int32)
    return dest_row_TK, source_of_rows(dest_row_TK, routing.src_pair_R.shape[0])


def _begins(size_GE, exchange):
    """First row of every (chunk, expert): by chunk, by part, by local expert."""
    local = exchange.groups.num_local_experts
    if exchange.algorithm.send_order is None:
        return (size_GE.flatten().cumsum(0) - size_GE.flatten()).view(size_GE.shape)
    order_P, part_P = exchange.algorithm.send_order_on(size_GE.device)
    within = torch.arange(local, device=size_GE.device)
    order_E = (order_P[:, None] * local + within).flatten()
    place_E = (part_P[:, None] * local + within).flatten()
    size = size_GE[:, order_E].flatten()
    return (size.cumsum(0) - size).view(size_GE.shape)[:, place_E]


def source_of_rows(dest_row_TK, num_rows):
    """int32 [num_rows], the pair in each row, -1 in unused ones; dropped pairs share a row more."""
    pair = torch.arange(dest_row_TK.numel(), dtype=torch.int32, device=dest_row_TK.device)
    row = torch.where(dest_row_TK < 0, num_rows, dest_row_TK).flatten().long()
    return pair.new_full((num_rows + 1,), -1).scatter_(0, row, pair)[:num_rows]
