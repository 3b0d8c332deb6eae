"""Tokens to the experts that were chosen for them, and back.

x_TM -- ops.dispatch --> rows by expert -- exchange.forth --> rows of the local experts
y_TM <-- ops.combine -- rows by expert <-- exchange.back  --  expert outputs

Where a flow sends each row to the r ranks that have a part of its expert, that is a routing to r
times as many choices: dispatch writes the copies, combine adds in fp32 what comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .. import ops
from ..distributed import Exchange, Flow
from .chunks import ExpertRows, arrange
from .overlap import overlapped
from .routing import Routing
from .row_order import source_of_rows


def dispatch_and_combine(
    x_TM: torch.Tensor,
    routing: Routing,
    experts: Callable[[ExpertRows], torch.Tensor],
    exchange: Exchange,
    overlap_degree: int = 1,
    flow: Flow | None = None,
) -> torch.Tensor:
    """Send each token to its experts, apply them, and add the weighted results.

    Args:
        x_TM: [T, M].
        routing: routing of these T tokens.
        experts: maps :class:`ExpertRows` to a tensor of the shape of its rows.
        exchange: between the ranks that hold the experts, or parts of them: that of the flow.
        overlap_degree: chunks in which rows travel, so that one is computed while others do.
        flow: of :class:`~fairseq_tutel.moe.Experts`; None: whole experts, where they are.

    Returns:
        [T, M]; zero for a token none of whose choices was kept.
    """
    network, keep_PM, compute = None, None, experts
    # wrapped ones, as torch.compile and checkpoint wrappers do it, have what is inside
    if flow is not None and not flow.is_plain and hasattr(experts, "network"):
        network = experts.network(x_TM.dtype, flow)
        keep_PM = _pairs_kept(x_TM, routing, network.dropout_at_source)
        compute = functools.partial(experts, network=network)
        routing = to_parts(routing, flow.copies)
    dest_row_TK, src_pair_R, chunks = arrange(routing, exchange, overlap_degree)
    rows = ops.dispatch(x_TM, dest_row_TK, src_pair_R)
    if len(chunks) > 1:
        out = overlapped(rows, chunks, experts, exchange, network)
    else:
        (chunk,) = chunks
        rows = exchange.forth(rows, chunk.parts)
        out = compute(ExpertRows(chunk.by_expert(rows), chunk.offsets))
        out = exchange.back(chunk.by_rank(out), chunk.parts)
    if keep_PM is not None:
        top_k = dest_row_TK.shape[1] // flow.copies
        out = _drop(out, src_pair_R, keep_PM, flow.copies, top_k, network.dropout_at_source)
    return ops.combine(out, dest_row_TK, src_pair_R, routing.topk_weight_TK)


def to_parts(routing: Routing, copies: int) -> Routing:
    """The routing to parts of experts, where each expert has r on as many ranks.

    Part q of expert j has number q*E + j, and the rows that expert j had.

    Args:
        routing: to E experts, K each.
        copies: r.

    Returns:
        to r*E parts, r*K each: choice q*K + k is part q of choice k.
    """
    if copies == 1:
        return routing
    num_rows, (tokens, top_k) = routing.src_pair_R.shape[0], routing.expert_TK.shape
    used = num_rows
    if not routing.padded:
        used = routing.num_kept_per_expert_E.sum(dtype=torch.int32)
    part = torch.arange(copies, dtype=torch.int32, device=routing.dest_row_TK.device)[:, None]

    def shifted(number_TK, by):
        moved_TrK = number_TK[:, None] + part * by
        moved_TrK = torch.where(number_TK[:, None] < 0, -1, moved_TrK).to(torch.int32)
        return moved_TrK.view(tokens, copies * top_k)

    dest_row = shifted(routing.dest_row_TK, used)
    return routing._replace(
        expert_TK=shifted(routing.expert_TK, routing.num_experts),
        dest_row_TK=dest_row,
        src_pair_R=source_of_rows(dest_row, copies * num_rows),
        topk_weight_TK=routing.topk_weight_TK.repeat(1, copies),
        num_routed_KE=routing.num_routed_KE.repeat(1, copies),
        num_kept_per_expert_E=routing.num_kept_per_expert_E.repeat(copies),
    )


def _pairs_kept(x_TM, routing, dropout):
    """bool [T*K, M], what dropout keeps of the output of each pair; None without dropout."""
    if dropout == 0:
        return None
    shape = routing.expert_TK.numel(), x_TM.shape[1]
    return torch.empty(shape, dtype=torch.bool, device=x_TM.device).bernoulli_(1 - dropout)


def _drop(out_RM, src_pair_R, keep_PM, copies, top_k, dropout):
    """Dropout of each pair's output, of which every part is dropped alike: that of their sum.

    Args:
        src_pair_R: of r*K choices per token.
        keep_PM: of K choices per token.
    """
    if not len(keep_PM):
        return out_RM
    token = src_pair_R.clamp(min=0) // (copies * top_k)
    pair_R = token * top_k + src_pair_R.clamp(min=0) % top_k
    return torch.where(keep_PM[pair_R], out_RM / (1 - dropout), 0.0)
