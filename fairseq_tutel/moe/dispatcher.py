"""Tokens to the experts that were chosen for them, and back.

x_TM -- ops.dispatch --> rows by expert -- exchange.dispatch --> rows of the local experts
y_TM <-- ops.combine -- rows by expert <-- exchange.combine  --  expert outputs

With r > 1 each row goes to the r ranks that have a part of its expert, which is a routing to r
times as many choices: dispatch writes the copies, combine adds in fp32 what comes back.
"""

from __future__ import annotations

import torch

from .. import ops
from ..distributed import Exchange, ExchangeRecord, ExpertParallelism
from .chunks import ExpertRows, arrange, source_of_rows
from .experts import ExpertBank
from .overlap import overlapped
from .routing import Routing


def dispatch_and_combine(
    x_TM: torch.Tensor,
    routing: Routing,
    experts: ExpertBank,
    exchange: Exchange,
    overlap_degree: int,
    parallelism: ExpertParallelism,
    record: ExchangeRecord | None,
) -> torch.Tensor:
    """Send each token of [T, M] to its experts, apply them, and add the weighted results, [T, M];
    zero for a token none of whose choices was kept.

    ``exchange``: between the ranks that hold the experts, or parts of them (of ``parallelism``);
    ``overlap_degree``: chunks in which rows travel, so that one is computed while others do;
    ``record``: takes what the exchanges tell besides the rows.
    """
    call = keep_pairs_M = None
    # wrapped ones, as torch.compile and checkpoint wrappers do it, have what is inside
    if not parallelism.is_replicated and experts.can_be_gathered:
        call = experts.call(x_TM.dtype, parallelism)
        if call.dropout_at_source:
            shape = routing.expert_TK.numel(), x_TM.shape[1]
            keep_pairs_M = torch.empty(shape, dtype=torch.bool, device=x_TM.device)
            keep_pairs_M.bernoulli_(1 - call.dropout_at_source)
        routing = to_parts(routing, parallelism.num_destinations)
    dest_row_TK, src_pair_R, chunks = arrange(routing, exchange, overlap_degree)
    rows = ops.dispatch(x_TM, dest_row_TK, src_pair_R)
    if len(chunks) > 1:
        out = overlapped(rows, chunks, experts, exchange, call, record)
    else:
        (chunk,) = chunks
        rows = exchange.dispatch(rows, chunk.splits, record)
        out = experts(ExpertRows(chunk.by_expert(rows), chunk.offsets), call)
        out = exchange.combine(chunk.by_rank(out), chunk.splits, record)
    if keep_pairs_M is not None:
        copies, dropout = parallelism.num_destinations, call.dropout_at_source
        out = _drop(out, src_pair_R, keep_pairs_M, copies, dest_row_TK.shape[1] // copies, dropout)
    return ops.combine(out, dest_row_TK, src_pair_R, routing.topk_weight_TK)


def to_parts(routing: Routing, copies: int) -> Routing:
    """The routing to parts of experts on r ranks each: part q of expert j has number q*E + j and
    the rows that expert j had; choice q*K + k is part q of choice k.
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


def _drop(out_RM, src_pair_R, keep_pairs_M, copies, top_k, dropout):
    """Dropout of each pair's output; its parts (r*K choices per token) are dropped alike."""
    if not len(keep_pairs_M):
        return out_RM
    token = src_pair_R.clamp(min=0) // (copies * top_k)
    pair_R = token * top_k + src_pair_R.clamp(min=0) % top_k
    return torch.where(keep_pairs_M[pair_R], out_RM / (1 - dropout), 0.0)
