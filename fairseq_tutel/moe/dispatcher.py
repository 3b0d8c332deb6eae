"""Tokens to the experts that were chosen for them, and back.

x_TM -- ops.dispatch --> rows by expert -- all-to-all --> rows of the local experts
y_TM <-- ops.combine -- rows by expert <-- all-to-all --  expert outputs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import ops
from ..distributed import ExpertParallelGroups, all_to_all, all_to_all_uneven, exchange_counts
from ..distributed.timing import ExchangeTimer
from .routing import Routing


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
    groups: ExpertParallelGroups,
    timer: ExchangeTimer | None = None,
) -> torch.Tensor:
    """Send each token to its experts, apply them, and add the weighted results.

    Args:
        x_TM: [T, M].
        routing: routing of these T tokens.
        experts: maps :class:`ExpertRows` to a tensor of the shape of its rows.
        groups: where the experts live.
        timer: measures the two exchanges.

    Returns:
        [T, M]; zero for a token none of whose choices was kept.
    """
    timer = timer or ExchangeTimer(x_TM.device, enabled=False)
    if routing.padded:
        return _padded(x_TM, routing, experts, groups, timer)
    if groups.ep_size == 1:
        rows = ops.dispatch(x_TM, routing.dest_row_TK, routing.src_pair_R)
        out = experts(ExpertRows(rows, routing.num_kept_per_expert_E.cumsum(0, dtype=torch.int32)))
        return ops.combine(out, routing.dest_row_TK, routing.src_pair_R, routing.topk_weight_TK)
    return _ragged(x_TM, routing, experts, groups, timer)


def _padded(x_TM, routing, experts, groups, timer):
    """Equal parts: rank-major [W, e, C] at the wire, expert-major [e, W*C] at the product."""
    ranks, local, capacity = groups.ep_size, groups.num_local_experts, routing.capacity
    model_dim = x_TM.shape[1]
    rows = ops.dispatch(x_TM, routing.dest_row_TK, routing.src_pair_R)
    with timer.measure():
        rows = all_to_all(rows, groups)
    rows = rows.view(ranks, local, capacity, model_dim).transpose(0, 1)
    out = experts(ExpertRows(rows.reshape(local, ranks * capacity, model_dim)))
    out = out.view(local, ranks, capacity, model_dim).transpose(0, 1).reshape(-1, model_dim)
    with timer.measure():
        out = all_to_all(out, groups)
    return ops.combine(out, routing.dest_row_TK, routing.src_pair_R, routing.topk_weight_TK)


def _ragged(x_TM, routing, experts, groups, timer):
    """Parts of the size that is needed. NOTE: the counts are read by the host."""
    count_WL = exchange_counts(routing.num_kept_per_expert_E, groups)
    sent_W = routing.num_kept_per_expert_E.view(groups.ep_size, -1).sum(1)
    sent, received = torch.stack([sent_W, count_WL.sum(1)]).tolist()
    pair_R = routing.src_pair_R[: sum(sent)]
    rows = ops.dispatch(x_TM, routing.dest_row_TK, pair_R)
    with timer.measure():
        rows = all_to_all_uneven(rows, sent, received, groups)
    order = _expert_major_order(count_WL, sum(received))
    if order is not None:
        rows = rows.index_select(0, order)
    out = experts(ExpertRows(rows, count_WL.sum(0).cumsum(0, dtype=torch.int32)))
    if order is not None:
        out = out.index_select(0, order.argsort())
    with timer.measure():
        out = all_to_all_uneven(out, received, sent, groups)
    return ops.combine(out, routing.dest_row_TK, pair_R, routing.topk_weight_TK)


def _expert_major_order(count_WL, num_rows):
    """Permutation from arrival order (rank, expert) to (expert, rank), None if that is the same."""
    ranks, local = count_WL.shape
    if ranks == 1 or local == 1:
        return None
    expert = torch.arange(local, device=count_WL.device).repeat(ranks)
    expert_R = expert.repeat_interleave(count_WL.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True)
