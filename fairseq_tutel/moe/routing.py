"""Assign rows of a buffer to (token, choice) pairs.

There are two layouts. *padded*: each expert has C rows, and unused rows are zero. No size depends
on the data, and ranks exchange equal parts. *ragged*: experts' rows follow each other without gaps,
K*T rows at most, and ranks also exchange the counts. In both a capacity limits the rows of an
expert, and both give the same results.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import ops
from ..config import MoEConfig
from .given_choices import Steering
from .overflow import assign_positions, count_pairs, reroute


@dataclass(frozen=True)
class RouterCall:
    """Options of one forward pass for a router."""

    config: MoEConfig
    training: bool
    num_tokens: int  # T that all ranks agreed on, the largest of any rank
    num_sequences: int = 1  # of this rank, of one length, one after the other
    compact: bool = False  # lay rows out by need even if the capacity is fixed
    reports: bool = True  # losses and counts are read; otherwise a router may return None
    reports_again: bool = True  # a recomputation by activation checkpointing computes them too
    steering: Steering | None = None  # given choices, or a place for recorded ones
    uncounted_T: torch.Tensor | None = None  # bool, does not count, but may be routed

    @property
    def capacity(self) -> int | None:
        """C; None if nothing is dropped."""
        return self.config.capacity(self.num_tokens, self.training)

    def num_fillers(self, num_tokens: int) -> int:
        """Return how many zero tokens Meta's code would add, up to the largest rank's number.

        With ``balance_over="longest"`` they count in the balance loss and in metrics.
        """
        counted = self.config.balance_over == "longest"
        return max(self.num_tokens - num_tokens, 0) if counted else 0

    def uncounted(self, pad_mask_T: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tokens that do not count, with those of a mask; None: all count."""
        if pad_mask_T is None or self.uncounted_T is None:
            return self.uncounted_T if pad_mask_T is None else pad_mask_T
        return pad_mask_T | self.uncounted_T

    @property
    def padded(self) -> bool:
        """Whether the layout is padded, see the module docstring."""
        return not self.compact and self.config.is_static(self.training)


def mask_of_tokens(pad_mask: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Flatten a padding mask to bool [T]; raise ValueError unless it has the tokens' ``shape``."""
    if pad_mask is None:
        return None
    if pad_mask.dtype != torch.bool or pad_mask.shape != shape:
        raise ValueError(
            f"pad_mask must be bool {tuple(shape)}, True for padding, got {pad_mask.dtype} "
            f"{tuple(pad_mask.shape)}"
        )
    return pad_mask.reshape(-1)


class Routing(NamedTuple):
    """Routing of the T tokens of one rank; a tuple, because hooks (fairseq's) look into tuples.

    Counts and indices are int32.
    """

    expert_TK: torch.Tensor  # after re-routing; -1 if not routed (padding, rejected)
    dest_row_TK: torch.Tensor  # row of the send buffer; -1 if not routed or dropped
    src_pair_R: torch.Tensor  # index t*K+k of the pair in each row; -1 in unused rows
    topk_weight_TK: torch.Tensor  # fp32 with the gate's gradient; 0 for pairs without a row
    num_routed_KE: torch.Tensor  # pairs before dropping and re-routing
    num_kept_per_expert_E: torch.Tensor  # rows of each expert from this rank, after dropping
    capacity: int | None  # C; None if nothing is dropped
    padded: bool  # the layout
    # pairs that found their expert full; None if slots are in the order of choices
    num_full_K: torch.Tensor | None = None
    # end of each expert's rows in a ragged buffer; None: the sums of ``num_kept_per_expert_E``
    row_end_E: torch.Tensor | None = None
    # tokens to dispatch, to whose gradient the router adds in place; None: dispatch the layer's
    tokens_TM: torch.Tensor | None = None
    routed_TK: torch.Tensor | None = None  # ``expert_TK`` before re-routing, if there was any

    @property
    def num_experts(self) -> int:
        """E, without null experts."""
        return self.num_routed_KE.shape[1]

    @property
    def kept_TK(self) -> torch.Tensor:
        """bool, pairs that have a row."""
        return self.dest_row_TK >= 0


def build_routing(
    expert_TK: torch.Tensor,
    gate_TK: torch.Tensor,
    call: RouterCall,
    *,
    priority: torch.Tensor | None = None,
    fallback: tuple[torch.Tensor, torch.Tensor] | None = None,
    log_gate_TE: torch.Tensor | None = None,
    is_final: bool = False,
) -> Routing:
    """Give every routed pair a row, drop pairs above the capacity, and weight the others.

    First choices take their slots before second choices and so on. Within a choice the order is
    that of the tokens, or of decreasing priority. If each pair has a priority, it alone gives the
    order. A pair that finds its expert full may take a fallback (:mod:`.overflow`).

    For K > 1 the gate values are divided by their sum: over all K with
    ``normalize_before_dropping``, otherwise over the kept pairs. The weight is the gate value for
    K = 1 (Switch Transformer, arXiv 2101.03961, eq. 2), and with ``unnormalized_weights``.

    Args:
        expert_TK: int32, -1 for pairs that must not be routed.
        gate_TK: fp32, differentiable; normalized with ``normalize_before_dropping``.
        priority: fp32 [T] or [T, K], larger goes first (default None: the order of the tokens).
        fallback: int32 [T, R], next best experts, -1 for none; and fp32 [T, R], their gate values,
            differentiable (default None: no re-routing).
        log_gate_TE: fp32 [T, E], logarithms of all gate values up to a constant per token, to
            normalize small values exactly (default None: sums are at least machine epsilon, as in
            fairseq's ``moe`` branch).
        is_final: the gate values are the weights (default False).
    """
    config, capacity = call.config, call.capacity
    num_experts = config.num_experts
    slots = num_routed_KE = num_full_K = routed_TK = None
    by_pair = priority is not None and priority.dim() == 2
    if capacity is None:
        fallback = None  # no pair finds its expert full
    if by_pair or fallback is not None:
        position_TK, num_routed_KE = assign_positions(expert_TK, num_experts, priority)
        slots = position_TK, num_routed_KE
        if by_pair and capacity is not None:
            num_full_K = (position_TK >= capacity).sum(0, dtype=torch.int32)
        if fallback is not None and capacity is not None:
            routed_TK = expert_TK
            expert_TK, position_TK, gate_TK, num_tried_KE = reroute(
                expert_TK, position_TK, gate_TK, num_routed_KE, fallback, capacity, priority
            )
            slots = position_TK, num_tried_KE
    normalized = is_final or config.unnormalized_weights or config.normalize_before_dropping
    normalize = expert_TK.shape[1] > 1 and not normalized
    dest_row_TK, src_pair_R, weight_TK, num_kept_E, row_end_E, num_sorted_KE = ops.assign_rows(
        expert_TK,
        gate_TK,
        num_experts,
        capacity=capacity,
        padded=call.padded,
        normalize=normalize and log_gate_TE is None,
        priority_T=priority if slots is None else None,
        slots=slots,
    )
    if normalize and log_gate_TE is not None:
        weight_TK, _ = share_of_gates(log_gate_TE, expert_TK, dest_row_TK >= 0)
    if config.route_scale != 1 and not is_final:
        weight_TK = weight_TK * config.route_scale
    return Routing(
        expert_TK=expert_TK,
        dest_row_TK=dest_row_TK,
        src_pair_R=src_pair_R,
        topk_weight_TK=mask_at_random(weight_TK, config.expert_output_masking, call.training),
        num_routed_KE=num_sorted_KE if num_routed_KE is None else num_routed_KE,
        num_kept_per_expert_E=num_kept_E,
        capacity=capacity,
        padded=call.padded,
        num_full_K=num_full_K,
        row_end_E=None if call.padded else row_end_E,
        routed_TK=routed_TK,
    )


def with_real_counts(routing: Routing, call: RouterCall) -> Routing:
    """Return a routing with the counts of the tokens that count, for reports only."""
    if call.uncounted_T is None:
        return routing
    live_T1, kept_TK = ~call.uncounted_T[:, None], routing.kept_TK
    routed_TK = routing.expert_TK if routing.routed_TK is None else routing.routed_TK
    routed_TK = torch.where(live_T1, routed_TK, -1)
    kept = torch.where(live_T1 & kept_TK, routing.expert_TK, -1)
    is_full_TK = (routed_TK >= 0) & ~(kept_TK & (routed_TK == routing.expert_TK))
    return routing._replace(
        num_routed_KE=count_pairs(routed_TK, routing.num_experts),
        num_kept_per_expert_E=count_pairs(kept, routing.num_experts).sum(0, dtype=torch.int32),
        num_full_K=is_full_TK.sum(0, dtype=torch.int32),
    )


def share_of_gates(
    log_gate_TE: torch.Tensor, expert_TK: torch.Tensor, valid_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide the gate values of valid choices by their sum, computed from logarithms.

    Return the shares [T, K], 0 for other choices; and the logarithms of the sums [T, 1], inf if no
    choice is valid.
    """
    log_TK = log_gate_TE.gather(1, expert_TK.clamp(min=0).long())
    valid_TK = valid_TK & (log_TK > -torch.inf)
    log_TK = log_TK.masked_fill(~valid_TK, torch.finfo(log_TK.dtype).min)
    total_T1 = log_TK.logsumexp(1, keepdim=True)
    total_T1 = total_T1.masked_fill(~valid_TK.any(1, keepdim=True), torch.inf)
    return (log_TK - total_T1).exp(), total_T1


def mask_at_random(values: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Set entries to zero with a probability (output masks of NLLB, arXiv 2207.04672, 6.2.2).

    Training does not scale the others; evaluation multiplies all by the expected share. A
    probability of 0 draws nothing.
    """
    if probability == 0:
        return values
    if not training:
        return values * (1 - probability)
    return torch.where(torch.rand(values.shape, device=values.device) >= probability, values, 0)


def mask_tokens(y_TM: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Apply :func:`mask_at_random` to whole tokens, which keep only their residual."""
    if probability == 0:
        return y_TM
    return y_TM * mask_at_random(torch.ones_like(y_TM[:, :1]), probability, training)
