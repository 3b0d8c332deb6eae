"""Tokens to the experts that were chosen for them, and back.

x_TM -- ops.dispatch --> rows by expert -- exchange.forth --> rows of the local experts
y_TM <-- ops.combine -- rows by expert <-- exchange.back  --  expert outputs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import ops
from ..distributed import Exchange
from .routing import Routing
from .row_order import rows_for_exchange


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all local experts.

    Attributes:
        rows: [e, N, M] with N rows per expert, unused ones zero (padded), or [R, M] (ragged).
        offsets: int32 [e], end of each expert's rows in a ragged buffer (rows after the last are
            unused); None says padded.
    """

    rows: torch.Tensor
    offsets: torch.Tensor | None = None


def dispatch_and_combine(
    x_TM: torch.Tensor,
    routing: Routing,
    experts: Callable[[ExpertRows], torch.Tensor],
    exchange: Exchange,
) -> torch.Tensor:
    """Send each token to its experts, apply them, and add the weighted results.

    Args:
        x_TM: [T, M].
        routing: routing of these T tokens.
        experts: maps :class:`ExpertRows` to a tensor of the shape of its rows.
        exchange: between the ranks that hold the experts.

    Returns:
        [T, M]; zero for a token none of whose choices was kept.
    """
    through = _through_padded if routing.padded else _through_ragged
    return through(x_TM, routing, experts, exchange)


def _through_padded(x_TM, routing, experts, exchange):
    """Equal parts: rank-major [W, e, C] at the wire, expert-major [e, W*C] at the product."""
    ranks, local = exchange.groups.ep_size, exchange.groups.num_local_experts
    capacity, model_dim = routing.capacity, x_TM.shape[1]
    dest_row_TK, src_pair_R = rows_for_exchange(routing, exchange)
    rows = exchange.forth(ops.dispatch(x_TM, dest_row_TK, src_pair_R))
    rows = rows.view(ranks, local, capacity, model_dim).transpose(0, 1)
    out = experts(ExpertRows(rows.reshape(local, ranks * capacity, model_dim)))
    out = out.view(local, ranks, capacity, model_dim).transpose(0, 1).reshape(-1, model_dim)
    return ops.combine(exchange.back(out), dest_row_TK, src_pair_R, routing.topk_weight_TK)


def _through_ragged(x_TM, routing, experts, exchange):
    """Parts of the size that is needed. NOTE: between ranks the host reads the counts."""
    dest_row_TK, src_pair_R = rows_for_exchange(routing, exchange)
    count_WL, parts = exchange.share_counts(routing.num_kept_per_expert_E)
    if parts is not None:
        src_pair_R = src_pair_R[: sum(parts.sent_W)]
    rows = exchange.forth(ops.dispatch(x_TM, dest_row_TK, src_pair_R), parts)
    order = _expert_major_order(count_WL, rows.shape[0])
    if order is not None:
        rows = rows.index_select(0, order)
    out = experts(ExpertRows(rows, count_WL.sum(0).cumsum(0, dtype=torch.int32)))
    if order is not None:
        out = out.index_select(0, order.argsort())
    out = exchange.back(out, parts)
    return ops.combine(out, dest_row_TK, src_pair_R, routing.topk_weight_TK)


def _expert_major_order(count_WL, num_rows):
    """Permutation from arrival order (rank, expert) to (expert, rank), None if that is the same."""
    ranks, local = count_WL.shape
    if ranks == 1 or local == 1:
        return None
    expert = torch.arange(local, device=count_WL.device).repeat(ranks)
    expert_R = expert.repeat_interleave(count_WL.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True)
