"""What a layer reports besides its output: a loss with gradient, metrics without.

The routing metrics have the names and meaning of fairseq's ``moe`` branch (facts of its
top2gate.py): percentages of the tokens of one rank, one value per layer and batch. The two times of
the forward all-to-alls are zero unless they are recorded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .routing import Routing

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
# "top" and "bottom" experts are this share of all, at least one
_BALANCE_SHARE = 0.2


class MoEAux(NamedTuple):
    """Second return value of :class:`MoELayer`.

    Attributes:
        loss: fp32 scalar with gradient, the balance loss of this layer (1.0 at perfect balance).
        metrics: fp32 [11] in the order of METRIC_NAMES, no gradient.
        load_E: int32 [E], choices routed to each expert by this rank's tokens, before dropping.
        needed_capacity: int32 scalar, slots that the fullest expert would have needed.
    """

    loss: torch.Tensor
    metrics: torch.Tensor
    load_E: torch.Tensor
    needed_capacity: torch.Tensor

    def metrics_dict(self) -> dict[str, float]:
        """Metrics by name. NOTE: reads the values back to the host."""
        return dict(zip(METRIC_NAMES, self.metrics.tolist(), strict=True))


@torch.no_grad()
def routing_metrics(
    routing: Routing, chosen_KE: torch.Tensor, entropy_sum: torch.Tensor
) -> torch.Tensor:
    """Compute the metrics of one layer; the two times are zero.

    The reference divides overflow by the routed count and logs nan where it is zero; here it is 0.
    Overflow of a top-1 layer is 0, as there. Padding that is not routed is on no expert; the
    reference's histograms count it. Choices after the second are in no metric.

    Args:
        chosen_KE: [K, E], choices per expert before rejection by ``random`` (the reference's
            histograms count rejected choices, its overflow does not).
        entropy_sum: fp32 scalar, sum over tokens of the entropy of the gate's distribution in nats.

    Returns:
        fp32 [11] in the order of METRIC_NAMES.
    """
    num_tokens, top_k = routing.expert_TK.shape
    # Both choices at once: on a GPU each of these small operations costs a launch, in every layer.
    metrics = torch.zeros(len(METRIC_NAMES), dtype=torch.float32, device=entropy_sum.device)
    if top_k > 1:
        routed_K = routing.num_routed_KE.sum(1)
        dropped_K = routed_K - routing.kept_TK.sum(0)
        metrics[:2] = 100.0 * dropped_K[:2] / routed_K[:2].clamp(min=1)
    metrics[2] = entropy_sum / max(num_tokens, 1)
    share_KE = 100.0 * chosen_KE[:2].float() / max(num_tokens, 1)
    ranked_KE = share_KE.sort(dim=1, descending=True).values
    count = max(math.ceil(routing.num_experts * _BALANCE_SHARE), 1)
    balance_K3 = torch.stack(
        [
            ranked_KE[:, :count].sum(1),
            ranked_KE[:, -count:].sum(1),
            (share_KE == 0).sum(1, dtype=share_KE.dtype),
        ],
        dim=1,
    )
    metrics[3 : 3 + balance_K3.numel()] = balance_K3.flatten()
    return metrics
