"""Rows and experts of a step in which ranks help each other (``balance_ranks``).

The plan and the moves of weights are in :mod:`fairseq_tutel.distributed.balance`. Here a routing to
experts becomes a routing to *pieces*, an expert's part on one rank. The exchange then sees pieces
in place of experts, and knows no helpers.
"""

from typing import Any

import torch

from ..distributed import Exchange, ExchangeRecord, balance
from ..distributed.exchanges import Splits, stream_of
from .exchange_choice import ExchangeChoice
from .experts import ExpertBank, ExpertRows, PreparedExperts
from .routing import Routing
from .torch_modes import untraced


@untraced  # a trace sees neither collectives nor the host's plan
def balanced(
    routing: Routing,
    experts: ExpertBank,
    choice: ExchangeChoice,
    model_dim: int,
    dtype: torch.dtype,
    record: ExchangeRecord | None,
) -> tuple[Routing, Any, list[tuple[torch.Tensor, Splits]]]:
    """Plan who helps whom in a step. Collective; the host reads the counts of all ranks.

    Rows of ``routing``, of ``dtype``, are ragged, by expert. ``record`` takes the loads of the
    ranks, and what moves. Return the routing to pieces, the bank or :class:`HelpedExperts`, and the
    counts of chunks as ``ExchangeAlgorithm.share_chunks`` does.
    """
    groups, degree = choice.exchange.groups, choice.overlap_degree
    device, rank = routing.dest_row_TK.device, groups.ep_rank
    count_PE = balance.gather_counts(routing.num_kept_per_expert_E, groups)
    # not by whether gradients are enabled: a recomputation enables them and must plan the same
    min_rows = choice.config.balance_min_rows or balance.measured_break_even(
        groups, dtype, device, training=experts.training
    )
    weights = sum(param.numel() for param in experts.parameters()) / groups.num_local_experts
    plan = balance.plan_step(
        count_PE,
        tolerance=choice.config.balance_tolerance,
        min_rows=min_rows,
        travel=balance.rows_while_travelling(min_rows, model_dim, weights),
    )
    chunks = plan.chunks(rank, degree)
    own_rows = [int(count_Pv[:, : plan.local].sum()) for count_Pv, _ in chunks]
    chunks = [(count_Pv.to(device), splits) for count_Pv, splits in chunks]
    if record is not None:
        record.loads_P = plan.load_P
        record.rows_helped = sum(move.end - move.begin for move in plan.moves if move.home == rank)
    if not plan.moves:
        return routing, experts, chunks
    plain = Exchange(choice.exchange.algorithm)  # weights travel as they are
    moves = balance.WeightMoves(plan.moves, plain, stream_of(device), record)
    return _to_pieces(routing, plan, rank), HelpedExperts(experts, moves, own_rows), chunks


def _to_pieces(routing: Routing, plan: balance.BalancePlan, rank: int) -> Routing:
    """Return the routing of the same rows to pieces, in the order in which they are sent."""
    device = routing.dest_row_TK.device
    row_R, piece_R = (index.to(device) for index in plan.new_rows(rank))
    src_pair_R = torch.empty_like(routing.src_pair_R[: len(row_R)])
    src_pair_R[row_R] = routing.src_pair_R[: len(row_R)]
    old_TK = routing.dest_row_TK.clamp(min=0).long()

    def moved(values_R):
        if not len(values_R):
            return torch.full_like(routing.dest_row_TK, -1)
        return torch.where(routing.kept_TK, values_R[old_TK], -1).to(torch.int32)

    return routing._replace(
        expert_TK=moved(piece_R),
        dest_row_TK=moved(row_R),
        src_pair_R=src_pair_R,
        num_kept_per_expert_E=plan.count_PV[rank].to(device, torch.int32),
        row_end_E=None,
    )


class HelpedExperts:
    """Experts of one step: this rank's own, and those that it helps.

    Call it once for each chunk, in order. Weights travel while the first chunk's own rows are
    computed. ``own_rows`` of each chunk are this rank's own experts'; the helped ones follow.
    """

    def __init__(self, experts: ExpertBank, moves: balance.WeightMoves, own_rows: list[int]):
        self._experts, self.moves = experts, moves
        self._own_rows = iter(own_rows)
        self._own: PreparedExperts | None = None
        self._helped: PreparedExperts | None = None

    @untraced
    def __call__(self, batch: ExpertRows, prepared: PreparedExperts | None = None) -> torch.Tensor:
        """Compute [R, M] -> [R, M]; differentiable."""
        own_rows = next(self._own_rows)
        own_RM, helped_RM = batch.rows.split([own_rows, len(batch.rows) - own_rows])
        assert batch.offsets is not None  # rows are ragged
        local = len(batch.offsets) - len(self.moves.helped)
        own_ends, helped_ends = batch.offsets.tensor_split([local])
        own = ExpertRows(own_RM, own_ends)
        out_RM = self._first(own, prepared) if self._own is None else self._experts(own, self._own)
        if not self.moves.helped:
            return out_RM
        helped = ExpertRows(helped_RM, helped_ends - own_rows)
        return torch.cat([out_RM, self._experts(helped, self._helped)])

    def _first(self, own, prepared):
        """Compute the own rows of the first chunk while the weights travel."""
        if prepared is None:
            prepared = self._experts.prepare(own.rows.dtype, travels=True)
        assert prepared is not None  # banks without parameters are refused
        self.moves.start(prepared.params)
        self._own = prepared
        try:
            out_RM = self._experts(own, self._own)
        except Exception:
            self.moves.drain()
            raise
        out_RM, params = self.moves.wait(out_RM)
        self._helped = prepared._replace(params=params)
        return out_RM
