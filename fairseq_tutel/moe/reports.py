"""What routers and layers return beside their output: a loss with gradient, and raw counts.

Routing makes the counts anyway. Metrics are computed from them where somebody wants them
(:mod:`.metrics`): on a GPU each of their small operations costs a launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..distributed import ExchangeRecord, process_world, sum_tensor_over_ranks_
from .metrics import METRIC_NAMES, routing_metrics
from .routing import Routing


class RouterAux(NamedTuple):
    """Second return value of a router. With N null experts, E below is E + N but in ``chosen``.

    Attributes:
        loss: fp32 scalar with gradient, the balance loss (1.0 at perfect balance).
        entropy_sum: fp32 scalar, sum over tokens of the entropy of the gate's distribution in nats.
        num_chosen_KE: int32 [K, E], tokens by choice and expert as chosen; ``num_routed_KE`` of the
            :class:`~fairseq_tutel.moe.Routing` is less where a policy rejected choices.
        mean_prob_E: fp32 [E] with gradient, mean over tokens of the gate's probabilities, where the
            balance loss is still to be added (``balance_scope="global"``, in training); or None.
        balance_counts: int64 [E + 1] in the same case: pairs by expert, and how many there are.
        bias_counts: int32 [E] or [E, bins + 1], what the router's ``update_load_bias`` takes, in
            training with ``load_bias``; or None.
        num_null_KN: int32 [K, N], pairs by choice and null expert; None without such.
        num_fillers: tokens that ``entropy_sum`` and ``num_chosen_KE`` count beside this rank's.
    """

    loss: torch.Tensor
    entropy_sum: torch.Tensor
    num_chosen_KE: torch.Tensor
    mean_prob_E: torch.Tensor | None = None
    balance_counts: torch.Tensor | None = None
    bias_counts: torch.Tensor | None = None
    num_null_KN: torch.Tensor | None = None
    num_fillers: int = 0


class MoEAux(NamedTuple):
    """Second return value of :class:`MoELayer`; flat, so that checkpointing can pass it on."""

    loss: torch.Tensor
    entropy_sum: torch.Tensor
    num_chosen_KE: torch.Tensor
    num_routed_KE: torch.Tensor  # int32, choices of this rank's tokens, before dropping
    num_kept_per_expert_E: torch.Tensor  # int32 rows of each from this rank, after dropping
    num_tokens: int  # T of this rank, with those of ``num_fillers``
    # what the exchanges told: their times, if they were taken, and the sums of wire_errors(), those
    # of gradients after the backward pass; or None
    record: ExchangeRecord | None = None
    num_slots: int = 0  # rows of this rank's padded buffer, E * C; 0 where rows are ragged
    mean_prob_E: torch.Tensor | None = None
    balance_counts: torch.Tensor | None = None
    bias_counts: torch.Tensor | None = None
    num_full_K: torch.Tensor | None = None  # see Routing
    num_null_KN: torch.Tensor | None = None

    @property
    def load_E(self) -> torch.Tensor:
        """int32 [E], choices routed to each expert by this rank's tokens, before dropping."""
        return self.num_routed_KE.sum(0, dtype=torch.int32)

    @property
    def null_share(self) -> torch.Tensor:
        """fp32 scalar, percentage of this rank's choices that are null experts."""
        nulls = self.num_null_KN.sum()
        return 100.0 * nulls / (nulls + self.num_chosen_KE.sum()).clamp(min=1)

    def metrics_dict(self) -> dict[str, float]:
        """Metrics by name. NOTE: reads the values back to the host."""
        values = routing_metrics([self])[:, 0]
        return dict(zip(METRIC_NAMES, values.tolist(), strict=True))


def make_aux(
    router_aux: RouterAux, routing: Routing, num_tokens: int, record: ExchangeRecord | None = None
) -> MoEAux:
    """The report of a call."""
    of_router = router_aux._asdict()
    num_tokens += of_router.pop("num_fillers")
    return MoEAux(
        **of_router,
        num_full_K=routing.num_full_K,
        num_routed_KE=routing.num_routed_KE,
        num_kept_per_expert_E=routing.num_kept_per_expert_E,
        num_tokens=num_tokens,
        num_slots=routing.num_experts * routing.capacity if routing.padded else 0,
        record=record,
    )


def balance_over_ranks(reports: Iterable[MoEAux]) -> list[MoEAux]:
    """Add the balance loss over the tokens of all ranks, ``balance_scope="global"``, to reports.

    A rank's loss is ``E * sum_e F_e * mean_t(p_te)``: F from the counts of all ranks, p of its own
    tokens. Weighted by the ranks' tokens and summed, the gradient is that of one process with all
    tokens (Qiu et al., arXiv 2501.11873, eq. 3). Micro-batches of one update are balanced one by
    one; fairseq's dummy batches count, too.

    One all-reduce of integers over all ranks, in training with that option; reports are in the same
    order on all ranks.
    """
    reports = list(reports)
    waiting = [aux.balance_counts for aux in reports if aux.balance_counts is not None]
    if not waiting:
        return reports
    counts = torch.cat(waiting)
    if process_world()[1] > 1:
        sum_tensor_over_ranks_(counts)
    counts_by_layer = iter(counts.split([len(mine) for mine in waiting]))
    finished = []
    for aux in reports:
        if aux.balance_counts is not None:
            pairs = next(counts_by_layer).double()
            share_E = (pairs[:-1] / pairs[-1].clamp(min=1)).to(aux.mean_prob_E.dtype)
            loss = aux.loss + len(share_E) * torch.dot(aux.mean_prob_E, share_E)
            aux = aux._replace(loss=loss, mean_prob_E=None, balance_counts=None)
        finished.append(aux)
    return finished
