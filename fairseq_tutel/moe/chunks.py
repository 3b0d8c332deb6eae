"""Put rows in the order in which they are sent, and cut them into chunks.

Chunks are neighbours in the send buffer, so that sending one needs no copy. Without overlap there
is one chunk.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import ops
from ..distributed import Exchange
from ..distributed.exchanges import Splits, chunk_edges
from .routing import Routing


class Chunk(NamedTuple):
    """Rows that are exchanged together."""

    span: slice  # of the send buffer
    splits: Splits | None  # rows per rank; None if they are equal
    offsets: torch.Tensor | None  # of ExpertRows
    # puts arrived rows [n, M] in the order of the experts, and the inverse; differentiable
    by_expert: Callable[[torch.Tensor], torch.Tensor]
    by_rank: Callable[[torch.Tensor], torch.Tensor]

    def of(self, rows_RM: torch.Tensor | None) -> torch.Tensor | None:
        """Return the chunk's part of a buffer; None stays None."""
        return None if rows_RM is None else rows_RM[self.span]


def to_parts(routing: Routing, copies: int) -> Routing:
    """Replace each expert of a routing by its ``copies`` (r) parts, each on a rank of its own.

    Part q of expert j has number q*E + j and as many rows as expert j; choice q*K + k sends choice
    k to part q.
    """
    if copies == 1:
        return routing
    num_rows, (tokens, top_k) = routing.src_pair_R.shape[0], routing.expert_TK.shape
    rows_of_part = num_rows
    if not routing.padded:
        rows_of_part = routing.num_kept_per_expert_E.sum(dtype=torch.int32)
    part = torch.arange(copies, dtype=torch.int32, device=routing.dest_row_TK.device)[:, None]

    def shifted(number_TK, by):
        moved_TrK = number_TK[:, None] + part * by
        moved_TrK = torch.where(number_TK[:, None] < 0, -1, moved_TrK).to(torch.int32)
        return moved_TrK.view(tokens, copies * top_k)

    dest_row = shifted(routing.dest_row_TK, rows_of_part)
    return routing._replace(
        expert_TK=shifted(routing.expert_TK, routing.num_experts),
        dest_row_TK=dest_row,
        src_pair_R=ops.source_of_rows(dest_row, copies * num_rows),
        topk_weight_TK=routing.topk_weight_TK.repeat(1, copies),
        num_routed_KE=routing.num_routed_KE.repeat(1, copies),
        num_kept_per_expert_E=routing.num_kept_per_expert_E.repeat(copies),
        row_end_E=None,
    )


def arrange(
    routing: Routing,
    exchange: Exchange,
    degree: int,
    counted: Sequence[tuple[torch.Tensor, Splits | None]] | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[Chunk]]:
    """Cut the rows into chunks. NOTE: the host reads the counts of ragged rows between ranks.

    Padded rows are cut along the capacity, ragged ones along the rows of every (rank, expert). The
    sizes of chunks differ by at most one row of each. ``counted`` has the counts of ragged chunks
    if the ranks exchanged them already (default None: exchange them here). Return ``dest_row_TK``
    and ``src_pair_R`` for dispatch and combine, and ``degree`` chunks or one per row of capacity.
    """
    dest_row_TK, src_pair_R = rows_for_exchange(routing, exchange, degree)
    if routing.padded:
        return (dest_row_TK, src_pair_R), _padded(routing, exchange, degree)
    if counted is None:
        counted = exchange.algorithm.share_chunks(routing.num_kept_per_expert_E, degree)
    sizes = [src_pair_R.shape[0] if splits is None else sum(splits.sent_P) for _, splits in counted]
    chunks = [
        _ragged(count_Pe, splits, span, routing.row_end_E)
        for (count_Pe, splits), span in zip(counted, _spans(sizes), strict=True)
    ]
    return (dest_row_TK, src_pair_R[: sum(sizes)]), chunks


def _padded(routing, exchange, degree):
    """Return chunks of equal parts: [P, e, C] on the wire, [e, P*C] in the product."""
    ranks, local = exchange.groups.ep_size, exchange.groups.num_local_experts
    edges = [routing.capacity * number // degree for number in range(degree + 1)]
    capacities = [end - begin for begin, end in itertools.pairwise(edges) if end > begin]

    def chunk(capacity, span):
        def by_expert(rows):
            rows = rows.view(ranks, local, capacity, -1).transpose(0, 1)
            return rows.reshape(local, ranks * capacity, -1)

        def by_rank(out):
            return out.view(local, ranks, capacity, -1).transpose(0, 1).reshape(-1, out.shape[-1])

        return Chunk(span, None, None, by_expert, by_rank)

    spans = _spans([routing.num_experts * capacity for capacity in capacities])
    return [chunk(*each) for each in zip(capacities, spans, strict=True)]


def _ragged(count_Pe, splits, span, row_end_E):
    """Return a chunk of unequal parts: int [P, e] rows that each rank sends to each expert."""
    if splits is None and row_end_E is not None:  # all rows stay here, in their order
        return Chunk(span, None, row_end_E, lambda rows: rows, lambda out: out)
    ranks, local = count_Pe.shape
    count_e = count_Pe[0] if ranks == 1 else count_Pe.sum(0)
    offsets = count_e.cumsum(0, dtype=torch.int32)
    if ranks == 1 or local == 1:  # the order of ranks is that of experts
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
    return [slice(begin, end) for begin, end in itertools.pairwise(edges)]


def rows_for_exchange(
    routing: Routing, exchange: Exchange, degree: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``dest_row_TK`` and ``src_pair_R`` in the order of sending: by chunk, then by part."""
    if degree == 1 and exchange.algorithm.send_order is None:
        return routing.dest_row_TK, routing.src_pair_R
    num_rows_E = routing.num_kept_per_expert_E.to(torch.int64)
    if routing.padded and routing.capacity is not None:
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
    return dest_row_TK, ops.source_of_rows(dest_row_TK, routing.src_pair_R.shape[0])


def _begins(size_GE, exchange):
    """Return the first row of every (chunk, expert); rows are sent by chunk, part, local expert."""
    local = exchange.groups.num_local_experts
    if exchange.algorithm.send_order is None:
        return (size_GE.flatten().cumsum(0) - size_GE.flatten()).view(size_GE.shape)
    order_P, part_P = exchange.algorithm.send_order_on(size_GE.device)
    within = torch.arange(local, device=size_GE.device)
    order_E = (order_P[:, None] * local + within).flatten()
    place_E = (part_P[:, None] * local + within).flatten()
    size = size_GE[:, order_E].flatten()
    return (size.cumsum(0) - size).view(size_GE.shape)[:, place_E]
