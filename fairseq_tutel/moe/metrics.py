"""What a layer reports besides its output, and the metrics that are computed from it.

A layer reports a loss with gradient and raw counts, which routing makes anyway. The metrics of all
layers are computed from the counts at once, where somebody wants them: on a GPU each of their small
operations costs a launch.

The metrics have the names and meaning of fairseq's ``moe`` branch (facts of its top2gate.py):
percentages of the tokens of one rank, one value per layer and batch. The two times of the forward
all-to-alls are zero unless they are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..distributed import Leg

# "top" and "bottom" experts are this share of all, at least one
_BALANCE_SHARE = 0.2


class RouterAux(NamedTuple):
    """Second return value of a router.

    Attributes:
        loss: fp32 scalar with gradient, the balance loss (1.0 at perfect balance).
        entropy_sum: fp32 scalar without gradient, sum over tokens of the entropy of the gate's
            distribution in nats.
        num_chosen_KE: int32 [K, E], tokens by choice and expert as chosen; ``num_routed_KE`` of the
            :class:`~fairseq_tutel.moe.Routing` is less where a policy rejected choices.
        prob_sum_E: fp32 [E] with gradient, sum over tokens of the gate's probabilities, where the
            balance loss is still to be added (``balance_scope="global"``, in training); or None.
        bias_counts: int32 [E] or [E, bins], what the router's ``update_load_bias`` takes, in
            training with ``load_bias``; or None.
        num_null_KN: int32 [K, N], pairs by choice and null expert; None without such. With N of
            them, ``prob_sum_E`` and ``bias_counts`` have E + N entries.
    """

    loss: torch.Tensor
    entropy_sum: torch.Tensor
    num_chosen_KE: torch.Tensor
    prob_sum_E: torch.Tensor | None = None
    bias_counts: torch.Tensor | None = None
    num_null_KN: torch.Tensor | None = None


class MoEAux(NamedTuple):
    """Second return value of :class:`MoELayer`; flat, so that checkpointing can pass it on.

    Attributes:
        loss, entropy_sum, num_chosen_KE, prob_sum_E, bias_counts, num_null_KN: of the router, see
            :class:`RouterAux`.
        num_routed_KE: int32 [K, E], choices of this rank's tokens that were routed to each expert,
            before dropping.
        num_kept_per_expert_E: int32 [E], rows that each expert gets from this rank, after dropping.
        num_tokens: T of this rank.
        exchange_cpu_ms, exchange_cuda_ms: time of the layer's forward all-to-alls, 0 unless
            recorded.
        num_full_K: int32 [K] or None, see :class:`~fairseq_tutel.moe.Routing`.
        num_slots: rows of this rank's padded buffer, E * C; 0 where rows are ragged.
        wire_sums: fp32 [4, 2], of each :class:`~fairseq_tutel.distributed.Leg` the sums of squared
            errors and of squares of what was encoded for the wire, see :func:`wire_errors`; None
            where nothing is. Those of gradients are of the backward pass before, as they are not
            known sooner.
    """

    loss: torch.Tensor
    entropy_sum: torch.Tensor
    num_chosen_KE: torch.Tensor
    num_routed_KE: torch.Tensor
    num_kept_per_expert_E: torch.Tensor
    num_tokens: int
    exchange_cpu_ms: float = 0.0
    exchange_cuda_ms: float = 0.0
    num_slots: int = 0
    prob_sum_E: torch.Tensor | None = None
    bias_counts: torch.Tensor | None = None
    num_full_K: torch.Tensor | None = None
    wire_sums: torch.Tensor | None = None
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

    @property
    def needed_capacity(self) -> torch.Tensor:
        """int32 scalar, rows that the fullest expert would have needed from this rank."""
        return self.load_E.max()

    def metrics_dict(self) -> dict[str, float]:
        """Metrics by name. NOTE: reads the values back to the host."""
        metrics = torch.cat(routing_metrics([self]))
        return dict(zip(METRIC_NAMES, metrics.tolist(), strict=True))


class RoutingMetrics(NamedTuple):
    """Each fp32 [layers], of one batch and rank.

    Attributes:
        overflow_expert1, overflow_expert2: percentage of the routed first and second choices that
            were dropped.
        entropy_gating: mean entropy of the gate's distribution in nats.
        expert1_balance_top, expert1_balance_bottom: percentage of the tokens whose first choice is
            one of the fullest, or emptiest, fifth of the experts; expert2 for second choices.
        unused_expert1_count: experts that are nobody's first choice; expert2 for second choices.
        all_to_all_cpu_time_ms, all_to_all_cuda_time_ms: of the forward exchanges.
    """

    overflow_expert1: torch.Tensor
    overflow_expert2: torch.Tensor
    entropy_gating: torch.Tensor
    expert1_balance_top: torch.Tensor
    expert1_balance_bottom: torch.Tensor
    unused_expert1_count: torch.Tensor
    expert2_balance_top: torch.Tensor
    expert2_balance_bottom: torch.Tensor
    unused_expert2_count: torch.Tensor
    all_to_all_cpu_time_ms: torch.Tensor
    all_to_all_cuda_time_ms: torch.Tensor


def balanced_pairs(
    num_routed_KE: torch.Tensor, num_chosen_KE: torch.Tensor, num_null_KN: torch.Tensor | None
) -> torch.Tensor:
    """int32 [K, E + N], pairs that are balanced: those routed; with null experts, those chosen.

    ``random`` rejects choices of experts, not of null ones: after it they are not alike.
    """
    if num_null_KN is None:
        return num_routed_KE
    return torch.cat([num_chosen_KE, num_null_KN], 1)


METRIC_NAMES = RoutingMetrics._fields
# of the legs; summed over layers, and the number of layers that have one
WIRE_ERROR_NAMES = tuple(f"moe_wire_error_{leg.name.lower()}" for leg in Leg)
WIRE_LAYERS_NAMES = tuple(f"moe_wire_layers_{leg.name.lower()}" for leg in Leg)


@torch.no_grad()
def routing_metrics(reports: Sequence[MoEAux]) -> RoutingMetrics:
    """The metrics of the layers of one forward pass, without reading anything back to the host.

    The reference divides overflow by the routed count and logs nan where it is zero; here it is 0.
    Overflow of a top-1 layer is 0, as there. Padding that is not routed is on no expert; the
    reference's histograms count it. Histograms count choices that ``random`` rejected, overflow
    does not, both as there. Choices after the second are in no metric.

    Args:
        reports: of at least one layer.
    """
    kinds = {(aux.num_tokens, aux.num_routed_KE.shape) for aux in reports}
    if len(kinds) > 1:  # as of encoder and decoder: no common tensor
        parts = [routing_metrics([aux]) for aux in reports]
        return RoutingMetrics(*map(torch.cat, zip(*parts, strict=True)))
    num_tokens = max(reports[0].num_tokens, 1)
    # L: layers
    entropy_L = torch.stack([aux.entropy_sum for aux in reports]).float() / num_tokens
    overflow_LK = _overflow(reports)
    chosen_LKE = torch.stack([aux.num_chosen_KE[:2] for aux in reports])
    share_LKE = 100.0 * chosen_LKE.float() / num_tokens
    ranked_LKE = share_LKE.sort(dim=2, descending=True).values
    count = max(math.ceil(chosen_LKE.shape[2] * _BALANCE_SHARE), 1)
    top_LK, bottom_LK = ranked_LKE[..., :count].sum(2), ranked_LKE[..., -count:].sum(2)
    unused_LK = (chosen_LKE == 0).sum(2, dtype=share_LKE.dtype)

    zero_L = torch.zeros_like(entropy_L)

    def of_choice(values_LK, k):
        return values_LK[:, k] if k < values_LK.shape[1] else zero_L

    def of_clock(values):
        return entropy_L.new_tensor(values) if any(values) else zero_L

    return RoutingMetrics(
        overflow_expert1=of_choice(overflow_LK, 0),
        overflow_expert2=of_choice(overflow_LK, 1),
        entropy_gating=entropy_L,
        expert1_balance_top=of_choice(top_LK, 0),
        expert1_balance_bottom=of_choice(bottom_LK, 0),
        unused_expert1_count=of_choice(unused_LK, 0),
        expert2_balance_top=of_choice(top_LK, 1),
        expert2_balance_bottom=of_choice(bottom_LK, 1),
        unused_expert2_count=of_choice(unused_LK, 1),
        all_to_all_cpu_time_ms=of_clock([aux.exchange_cpu_ms for aux in reports]),
        all_to_all_cuda_time_ms=of_clock([aux.exchange_cuda_ms for aux in reports]),
    )


@torch.no_grad()
def wire_errors(reports: Sequence[MoEAux]) -> dict[str, torch.Tensor]:
    """Relative errors of what was encoded for the wire, without reading anything back to the host.

    The error of a layer's leg is the root of the mean square of the error over that of the values.

    Args:
        reports: of the layers of one forward pass.

    Returns:
        Under WIRE_ERROR_NAMES the sums of the layers' errors, under WIRE_LAYERS_NAMES the numbers
        of layers that have one, fp32 scalars; empty where nothing was encoded.
    """
    sums = [aux.wire_sums for aux in reports if aux.wire_sums is not None]
    if not sums:
        return {}
    error_XL, square_XL = torch.stack(sums).permute(2, 1, 0)  # X: legs, L: layers
    known_XL = (square_XL > 0) & square_XL.isfinite()
    ratio_XL = (error_XL / square_XL).sqrt().masked_fill(~known_XL, 0)
    values = torch.cat([ratio_XL.sum(1), known_XL.sum(1, dtype=torch.float32)])
    return dict(zip(WIRE_ERROR_NAMES + WIRE_LAYERS_NAMES, values.unbind(), strict=True))


def _overflow(reports: Sequence[MoEAux]) -> torch.Tensor:
    """fp32 [L, K], percentage of the routed choices that were dropped; [L, 0] for top-1.

    What an expert keeps is divided among the choices in their order: all first choices take their
    rows before any second one; or the layers say what was dropped. Re-routed pairs count as
    dropped: they found their expert full.
    """
    routed_LKE = torch.stack([aux.num_routed_KE for aux in reports])
    if routed_LKE.shape[1] == 1:
        return routed_LKE.new_empty((len(reports), 0), dtype=torch.float32)
    if reports[0].num_full_K is not None:
        full_LK = torch.stack([aux.num_full_K for aux in reports])
        return 100.0 * full_LK / routed_LKE.sum(2).clamp(min=1)
    kept_LE = torch.stack([aux.num_kept_per_expert_E for aux in reports])
    # of the choices up to each one, those that found no row
    lost_LKE = (routed_LKE.cumsum(1) - kept_LE[:, None]).clamp(min=0)
    lost_LK = lost_LKE.sum(2)
    dropped_LK = lost_LK.diff(dim=1, prepend=torch.zeros_like(lost_LK[:, :1]))
    return 100.0 * dropped_LK / routed_LKE.sum(2).clamp(min=1)
