"""Tokens to the experts that were chosen for them, and back.

x_TM -- ops.dispatch --> rows by expert -- exchange.forth --> rows of the local experts
y_TM <-- ops.combine -- rows by expert <-- exchange.back  --  expert outputs
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import ops
from ..distributed import Exchange
from .chunks import ExpertRows, arrange
from .overlap import overlapped
from .routing import Routing


def dispatch_and_combine(
    x_TM: torch.Tensor,
    routing: Routing,
    experts: Callable[[ExpertRows], torch.Tensor],
    exchange: Exchange,
    overlap_degree: int = 1,
) -> torch.Tensor:
    """Send each token to its experts, apply them, and add the weighted results.

    Args:
        x_TM: [T, M].
        routing: routing of these T tokens.
        experts: maps :class:`ExpertRows` to a tensor of the shape of its rows.
        exchange: between the ranks that hold the experts.
        overlap_degree: chunks in which rows travel, so that one is computed while others do.

    Returns:
        [T, M]; zero for a token none of whose choices was kept.
    """
    dest_row_TK, src_pair_R, chunks = arrange(routing, exchange, overlap_degree)
    rows = ops.dispatch(x_TM, dest_row_TK, src_pair_R)
    if len(chunks) > 1:
        out = overlapped(rows, chunks, experts, exchange)
    else:
        (chunk,) = chunks
        rows = exchange.forth(rows, chunk.parts)
        out = experts(ExpertRows(chunk.by_expert(rows), chunk.offsets))
        out = exchange.back(chunk.by_rank(out), chunk.parts)
    return ops.combine(out, dest_row_TK, src_pair_R, routing.topk_weight_TK)
