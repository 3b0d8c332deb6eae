"""What routers and layers return beside their output: a loss with gradient, and raw counts.

Routing makes the counts anyway. Metrics are computed from them where somebody wants them
(:mod:`.metrics`): on a GPU each of their small operations costs a launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..distributed import ExchangeRecord, process_world, sum_tensor_over_ranks_
from .routing import Routing

# "top" and "bottom" experts are this share of all, at least one
_BALANCE_SHARE = 0.2
METRIC_NAMES = (
    "overflow_expert1",
    "overflow_expert2",
    "entropy_gating",
    "expert1_balance_top",
    "expert1_balance_bottom",
    "unused_expert1_count",
    "expert2_balance_top",
    "expert2_balance_bottom",
    "unused_expert2_count",
    "all_to_all_cpu_time_ms",
    "all_to_all_cuda_time_ms",
)


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
    # fp32 [2], of a block that mixes the layer's output with a dense one's: the sum over its tokens
    # of the layer's share, with gradient, and how many there are; or None
    share_of_layer: torch.Tensor | None = None

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


@torch.no_grad()
def routing_metrics(reports: Sequence[MoEAux]) -> torch.Tensor:
    """The metrics of fairseq's ``moe`` branch, fp32 [11, layers], rows by METRIC_NAMES.

    As its top2gate.py has them: percentages of the tokens of one rank; of the routed first or
    second choices those that were dropped; tokens whose first or second choice is one of the
    fullest, or emptiest, fifth of the experts; experts that are nobody's; the mean entropy of the
    gate's distribution in nats; times of the forward exchanges, 0 unless taken.

    Overflow is 0 where nothing is routed (nan there), and for top-1 layers. Padding is on no
    expert, except where ``balance_over`` is not "unpadded": there, as in Meta's code, histograms
    count it, and with "longest" the zeros by which that fills up ranks. Histograms count choices
    that ``random`` rejected.
    """
    kinds = {(aux.num_tokens, aux.num_routed_KE.shape) for aux in reports}
    if len(kinds) > 1:  # as of encoder and decoder: no common tensor
        return torch.cat([routing_metrics([aux]) for aux in reports], 1)
    num_tokens = max(reports[0].num_tokens, 1)
    # L: layers
    entropy_L = torch.stack([aux.entropy_sum for aux in reports]).float() / num_tokens
    chosen_LKE = torch.stack([aux.num_chosen_KE[:2] for aux in reports])
    ranked_LKE = (100.0 * chosen_LKE.float() / num_tokens).sort(dim=2, descending=True).values
    count = max(math.ceil(chosen_LKE.shape[2] * _BALANCE_SHARE), 1)
    top_LK, bottom_LK = ranked_LKE[..., :count].sum(2), ranked_LKE[..., -count:].sum(2)
    shares = torch.stack([top_LK, bottom_LK, (chosen_LKE == 0).sum(2, dtype=top_LK.dtype)])
    of_two = pad(shares, (0, 2 - shares.shape[2])).permute(2, 0, 1).flatten(0, 1)
    overflow_LK = _overflow(reports)[:, :2]
    records = [aux.record or ExchangeRecord() for aux in reports]
    times = [[record.cpu_ms for record in records], [record.cuda_ms for record in records]]
    # to a GPU, only if there is something to copy
    times_2L = entropy_L.new_tensor(times) if any(map(any, times)) else of_two.new_zeros(2, 1)
    return torch.cat(
        [
            pad(overflow_LK, (0, 2 - overflow_LK.shape[1])).t(),
            entropy_L[None],
            of_two,
            times_2L.expand(2, len(reports)),
        ]
    )


def _overflow(reports: Sequence[MoEAux]) -> torch.Tensor:
    """fp32 [L, K], percentage of the routed choices that were dropped; [L, 0] for top-1.

    All first choices take their rows before any second one, or the layers say what was dropped.
    Re-routed pairs count as dropped: they found their expert full.
    """
    routed_LKE = torch.stack([aux.num_routed_KE for aux in reports])
    if routed_LKE.shape[1] == 1:
        return routed_LKE.new_empty((len(reports), 0), dtype=torch.float32)
    if reports[0].num_full_K is not None:
        lost_LK = torch.stack([aux.num_full_K for aux in reports])
    else:
        kept_LE = torch.stack([aux.num_kept_per_expert_E for aux in reports])
        # of the choices up to each one, those that found no row
        lost_LK = (routed_LKE.cumsum(1) - kept_LE[:, None]).clamp(min=0).sum(2)
        lost_LK = lost_LK.diff(dim=1, prepend=torch.zeros_like(lost_LK[:, :1]))
    return 100.0 * lost_LK / routed_LKE.sum(2).clamp(min=1)


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
