"""Reports of routers and layers beside their output: a loss with gradient, and raw counts.

Routing makes the counts anyway. Metrics are computed from them only when somebody reads them
(:mod:`.metrics`), because each small operation costs a launch on a GPU.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..distributed import ExchangeRecord
from .routing import Routing
from .update_load import UpdateLoad

_BALANCE_SHARE = 0.2  # "top" and "bottom" experts are this share of all, at least one
METRIC_NAMES = (
    *("overflow_expert1", "overflow_expert2", "entropy_gating"),
    *("expert1_balance_top", "expert1_balance_bottom", "unused_expert1_count"),
    *("expert2_balance_top", "expert2_balance_bottom", "unused_expert2_count"),
    *("all_to_all_cpu_time_ms", "all_to_all_cuda_time_ms"),
)
_TIMES = METRIC_NAMES[-2:]


class RouterAux(NamedTuple):
    """Second return value of a router. E includes null experts, except in ``num_chosen_KE``."""

    loss: torch.Tensor  # fp32 scalar with gradient, the balance loss (1.0 at perfect balance)
    entropy_sum: torch.Tensor  # fp32 scalar, sum over tokens of the gate's entropy in nats
    # int32, tokens by choice and expert; num_routed_KE is smaller if a policy rejected choices
    num_chosen_KE: torch.Tensor
    # fp32 with gradient, mean over tokens of the gate's probabilities, if the balance loss is still
    # to be added (balance_scope="global" or "update", in training)
    mean_prob_E: torch.Tensor | None = None
    balance_counts: torch.Tensor | None = None  # then int64 [E + 1], pairs by expert, their number
    # int32 [E] or [E, bins + 1] for update_load_bias, in training with load_bias
    bias_counts: torch.Tensor | None = None
    num_null_KN: torch.Tensor | None = None  # int32, pairs by choice and null expert, if any
    num_fillers: int = 0  # tokens that entropy_sum and num_chosen_KE count beside this rank's


class MoEAux(NamedTuple):
    """Second return value of :class:`MoELayer`; flat, so that checkpointing can pass it on.

    :class:`RouterAux` and :class:`Routing` explain the fields without a comment.
    """

    loss: torch.Tensor
    entropy_sum: torch.Tensor
    num_chosen_KE: torch.Tensor
    num_routed_KE: torch.Tensor
    num_kept_per_expert_E: torch.Tensor
    # T of this rank, with the router's ``num_fillers``; real tokens (scalar) of an attention mask
    num_tokens: int | torch.Tensor
    # measured times of the exchanges, and sums for wire_errors(), complete after the backward pass
    record: ExchangeRecord | None = None
    num_slots: int = 0  # rows of this rank's padded buffer, E * C; 0 if rows are ragged
    mean_prob_E: torch.Tensor | None = None
    balance_counts: torch.Tensor | None = None
    bias_counts: torch.Tensor | None = None
    num_full_K: torch.Tensor | None = None
    num_null_KN: torch.Tensor | None = None
    # fp32 [2] of a block that mixes the layer's output with a dense FFN's: sum over tokens of the
    # layer's share, with gradient, and number of tokens
    share_of_layer: torch.Tensor | None = None
    update_load: UpdateLoad | None = None  # with balance_scope="update"

    @property
    def load_E(self) -> torch.Tensor:
        """int32 [E], choices routed to each expert by this rank's tokens, before dropping."""
        return self.num_routed_KE.sum(0, dtype=torch.int32)

    @property
    def null_share(self) -> torch.Tensor:
        """fp32 scalar, percentage of this rank's choices that are null experts; 0 without them."""
        if self.num_null_KN is None:
            return torch.zeros((), device=self.loss.device)
        nulls = self.num_null_KN.sum()
        return 100.0 * nulls / (nulls + self.num_chosen_KE.sum()).clamp(min=1)

    def detached(self) -> "MoEAux":
        """Return the report without gradients."""
        return self._make(each.detach() if torch.is_tensor(each) else each for each in self)

    def metrics_dict(self) -> dict[str, float]:
        """Return :func:`metrics_of` this report. NOTE: the host waits for the device."""
        return metrics_of([self])

    def __repr__(self) -> str:
        """Return the loss and sizes; :meth:`metrics_dict` and ``load_E`` have the counts."""
        choices, experts = self.num_routed_KE.shape
        sizes = f"{int(self.num_tokens)} tokens, {experts} experts, top-{choices}"
        return f"{type(self).__name__}(loss={self.loss!r}, {sizes}; see metrics_dict(), load_E)"


def make_aux(
    router_aux: RouterAux | None,
    routing: Routing,
    num_tokens: int | torch.Tensor,
    record: ExchangeRecord | None = None,
    update_load: UpdateLoad | None = None,
) -> MoEAux:
    """Return the report of a call with ``num_tokens`` tokens on this rank."""
    if router_aux is None:
        raise ValueError("the router returned None in place of RouterAux although call.reports")
    of_router = router_aux._asdict()
    num_tokens += of_router.pop("num_fillers")
    return MoEAux(
        **of_router,
        num_full_K=routing.num_full_K,
        num_routed_KE=routing.num_routed_KE,
        num_kept_per_expert_E=routing.num_kept_per_expert_E,
        num_tokens=num_tokens,
        num_slots=routing.num_experts * (routing.capacity or 0) if routing.padded else 0,
        record=record,
        update_load=update_load,
    )


@torch.no_grad()
def metrics_of(reports: Sequence[MoEAux]) -> dict[str, float]:
    """Return the means of :func:`routing_metrics` over layers by name; times only if measured.

    ``moe_drop`` is the percentage of this rank's routed pairs that got no row.
    """
    means = routing_metrics(reports).mean(1)
    routed_L = torch.stack([aux.num_routed_KE.sum() for aux in reports])
    kept_L = torch.stack([aux.num_kept_per_expert_E.sum() for aux in reports])
    drop = 100.0 * (1 - kept_L / routed_L).nan_to_num(0.0).mean()  # 0/0: none routed
    values = torch.cat([means, drop[None].to(means.dtype)]).tolist()
    found = dict(zip((*METRIC_NAMES, "moe_drop"), values, strict=True))
    timed = any(aux.record and (aux.record.cpu_ms or aux.record.cuda_ms) for aux in reports)
    return {name: value for name, value in found.items() if timed or name not in _TIMES}


@torch.no_grad()
def routing_metrics(reports: Sequence[MoEAux]) -> torch.Tensor:
    """Return the metrics of fairseq's ``moe`` branch, fp32 [11, layers], rows by METRIC_NAMES.

    They are those of its top2gate.py, for the tokens of one rank:

    - ``overflow_*``: percentage of the routed first or second choices that were dropped; 0 if none
      is routed (nan there), and for top-1 layers.
    - ``*_balance_top``, ``*_balance_bottom``: percentage of tokens whose first or second choice is
      in the fullest or the emptiest fifth of the experts. Choices that ``random`` rejected count.
    - ``unused_*_count``: experts without a token.
    - ``entropy_gating``: mean entropy of the gate's distribution in nats.
    - ``all_to_all_*``: times of the forward exchanges; 0 unless measured.

    Padding is on no expert. But with ``balance_over`` other than "unpadded", histograms count
    padding as in Meta's code, and with "longest" also the zeros that fill up ranks.
    """
    kinds = {(aux.num_tokens, aux.num_routed_KE.shape) for aux in reports}
    if len(kinds) > 1:  # for example encoder and decoder: no common tensor
        return torch.cat([routing_metrics([aux]) for aux in reports], 1)
    num_tokens = max(reports[0].num_tokens, 1)
    # L: layers
    entropy_L = torch.stack([aux.entropy_sum for aux in reports]).float() / num_tokens
    chosen_LKE = torch.stack([aux.num_chosen_KE[:2] for aux in reports])
    ranked_LKE = (100.0 * chosen_LKE.float() / num_tokens).sort(dim=2, descending=True).values
    count = max(math.ceil(chosen_LKE.shape[2] * _BALANCE_SHARE), 1)
    top_LK, bottom_LK = ranked_LKE[..., :count].sum(2), ranked_LKE[..., -count:].sum(2)
    shares = torch.stack([top_LK, bottom_LK, (chosen_LKE == 0).sum(2, dtype=top_LK.dtype)])
    # rows: top, bottom and unused experts of first choices, then of second ones
    balance_6L = pad(shares, (0, 2 - shares.shape[2])).permute(2, 0, 1).flatten(0, 1)
    overflow_LK = _overflow(reports)[:, :2]
    records = [aux.record or ExchangeRecord() for aux in reports]
    times = [[record.cpu_ms for record in records], [record.cuda_ms for record in records]]
    # to a GPU, only if there is something to copy
    times_2L = entropy_L.new_tensor(times) if any(map(any, times)) else entropy_L.new_zeros(2, 1)
    overflow_2L = pad(overflow_LK, (0, 2 - overflow_LK.shape[1])).t()
    times_2L = times_2L.expand(2, len(reports))
    return torch.cat([overflow_2L, entropy_L[None], balance_6L, times_2L])


def _overflow(reports: Sequence[MoEAux]) -> torch.Tensor:
    """Return the percentage of routed choices that were dropped, fp32 [L, K]; [L, 0] for top-1.

    ``num_full_K`` has the dropped pairs. Without it the other counts tell, because first choices
    take rows before second ones. Re-routed pairs count as dropped: their expert was full.
    """
    routed_LKE = torch.stack([aux.num_routed_KE for aux in reports])
    if routed_LKE.shape[1] == 1:
        return routed_LKE.new_empty((len(reports), 0), dtype=torch.float32)
    full = [aux.num_full_K for aux in reports if aux.num_full_K is not None]
    if full:
        lost_LK = torch.stack(full)
    else:
        kept_LE = torch.stack([aux.num_kept_per_expert_E for aux in reports])
        # dropped among the first 1, 2, ... choices
        lost_LK = (routed_LKE.cumsum(1) - kept_LE[:, None]).clamp(min=0).sum(2)
        lost_LK = lost_LK.diff(dim=1, prepend=torch.zeros_like(lost_LK[:, :1]))
    return 100.0 * lost_LK / routed_LKE.sum(2).clamp(min=1)
