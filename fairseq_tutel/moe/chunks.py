"""What is exchanged at once, and its rows in the order of ranks and in the order of experts.

Without overlap there is one chunk. Chunks are neighbours in the send buffer, so that each is sent
from and received into memory as it lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..distributed import Exchange
from ..distributed.exchanges import Parts
from .routing import Routing
from .row_order import rows_for_exchange


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all local experts.

    Attributes:
        rows: [e, N, M] with N rows per expert, unused ones zero (padded), or [R, M] (ragged).
        offsets: int32 [e], end of each expert's rows in a ragged buffer (rows after the last are
            unused); None: padded.
    """

    rows: torch.Tensor
    offsets: torch.Tensor | None = None


class Chunk(NamedTuple):
    """Rows that are exchanged at once.

    Attributes:
        span: of the send buffer.
        parts: None for equal ones.
        offsets: as of :class:`ExpertRows`.
        by_expert: what arrived, [n, M] -> rows in the order of the experts; differentiable.
        by_rank: the inverse, for what the experts return.
    """

    span: slice
    parts: Parts | None
    offsets: torch.Tensor | None
    by_expert: Callable[[torch.Tensor], torch.Tensor]
    by_rank: Callable[[torch.Tensor], torch.Tensor]


class Arrangement(NamedTuple):
    """How the rows of a routing are sent.

    Attributes:
        dest_row_TK, src_pair_R: for dispatch and combine.
        chunks: in the order in which they are sent, one at least.
    """

    dest_row_TK: torch.Tensor
    src_pair_R: torch.Tensor
    chunks: list[Chunk]


def arrange(routing: Routing, exchange: Exchange, degree: int) -> Arrangement:
    """Cut the rows into chunks. NOTE: with ragged rows between ranks the host reads the counts.

    Padded rows are cut along the capacity, ragged ones along the rows of every (rank, expert). The
    sizes of chunks may differ by one row of each: a capacity that is padded to a multiple of the
    degree would drop other tokens.

    Args:
        routing: of this rank's tokens.
        exchange: between the ranks.
        degree: number of chunks, if the capacity has as many rows.
    """
    dest_row_TK, src_pair_R = rows_for_exchange(routing, exchange, degree)
    if routing.padded:
        return Arrangement(dest_row_TK, src_pair_R, _padded(routing, exchange, degree))
    # of one chunk as ever: an exchange that sends nothing has no parts
    counts = routing.num_kept_per_expert_E
    shared = (
        [exchange.share_counts(counts)] if degree == 1 else exchange.share_chunks(counts, degree)
    )
    sizes = [src_pair_R.shape[0] if parts is None else sum(parts.sent_W) for _, parts in shared]
    chunks = [
        _ragged(count_WL, parts, span)
        for (count_WL, parts), span in zip(shared, _spans(sizes), strict=True)
    ]
    return Arrangement(dest_row_TK, src_pair_R[: sum(sizes)], chunks)


def _padded(routing, exchange, degree):
    """Equal parts: rank-major [W, e, C] at the wire, expert-major [e, W*C] at the product."""
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


def _ragged(count_WL, parts, span):
    """Parts of the size that is needed."""
    offsets = count_WL.sum(0).cumsum(0, dtype=torch.int32)
    num_rows = span.stop - span.start if parts is None else sum(parts.received_W)
    order = _expert_major_order(count_WL, num_rows)
    if order is None:
        return Chunk(span, parts, offsets, _unchanged, _unchanged)
    inverse = order.argsort()

    def by_expert(rows):
        return rows.index_select(0, order)

    def by_rank(out):
        return out.index_select(0, inverse)

    return Chunk(span, parts, offsets, by_expert, by_rank)


def _expert_major_order(count_WL, num_rows):
    """Permutation from arrival order (rank, expert) to (expert, rank), None if that is the same."""
    ranks, local = count_WL.shape
    if ranks == 1 or local == 1:
        return None
    expert = torch.arange(local, device=count_WL.device).repeat(ranks)
    expert_R = expert.repeat_interleave(count_WL.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True)


def _spans(sizes):
    ends = list(itertools.accumulate(sizes, initial=0))
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _unchanged(rows):
    return rows
