"""Where every (token, choice) pair goes: from expert indices to rows of a buffer.

Two layouts. *padded*: each expert owns C rows whether or not it fills them, so that no size depends
on the data and ranks can exchange equal parts; unused rows are zero. *ragged*: the rows of an
expert follow those of the one before, K*T rows at most; the counts travel along. A capacity limits
the rows of an expert in both, and both give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import ops
from ..config import MoEConfig
from .overflow import assign_positions, reroute


@dataclass(frozen=True)
class RouterCall:
    """What a router needs of one forward pass beside its tokens."""

    config: MoEConfig  # the options of this call
    training: bool
    num_tokens: int  # T that all ranks agreed on, the largest of theirs
    num_sequences: int = 1  # of this rank's tokens, of one length and one after the other
    compact: bool = False  # whether rows are laid out by need, also where the capacity is fixed
    reports: bool = True  # whether losses and counts are read; without, a router may return None
    # whether a recomputation of this call (activation checkpointing) reads them, too
    reports_again: bool = True

    @property
    def capacity(self) -> int | None:
        """C; None where nothing is dropped."""
        return self.config.capacity(self.num_tokens, self.training)

    def num_fillers(self, num_tokens: int) -> int:
        """Zero tokens by which Meta's code fills up this rank's to the largest number of any rank:
        with ``balance_over="longest"`` they count in the balance loss of a rank, and in metrics.
        """
        counted = self.config.balance_over == "longest"
        return max(self.num_tokens - num_tokens, 0) if counted else 0

    @property
    def padded(self) -> bool:
        """Whether rows are laid out by the capacity, see the module docstring."""
        return not self.compact and self.config.is_static(self.training)


def mask_of_tokens(pad_mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """bool [T], the mask of the tokens of x [..., M], which is refused if it is none; or None."""
    if pad_mask is None:
        return None
    if pad_mask.dtype != torch.bool or pad_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"pad_mask must be bool {tuple(x.shape[:-1])}, True for padding, got {pad_mask.dtype} "
            f"{tuple(pad_mask.shape)}"
        )
    return pad_mask.reshape(-1)


class Routing(NamedTuple):
    """The routing of T tokens of one rank; hooks (fairseq's search for a NaN) look into tuples."""

    expert_TK: torch.Tensor  # int32, after re-routing; -1 where not routed (padding, rejected)
    dest_row_TK: torch.Tensor  # int32 row of the send buffer, -1 where not routed or no room
    src_pair_R: torch.Tensor  # int32 index t*K+k of the pair in each row, -1 in unused rows
    topk_weight_TK: torch.Tensor  # fp32, 0 where there is no row; carries the gate's gradient
    num_routed_KE: torch.Tensor  # int32 pairs, before dropping and re-routing
    num_kept_per_expert_E: torch.Tensor  # int32 rows of each from this rank, after dropping
    capacity: int | None  # C, or None where nothing is dropped
    padded: bool  # the layout
    # int32, pairs that found their expert full, where the order of slots is not that of choices
    num_full_K: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.num_routed_KE.shape[1]

    @property
    def kept_TK(self) -> torch.Tensor:
        return self.dest_row_TK >= 0


def build_routing(
    expert_TK: torch.Tensor,
    gate_TK: torch.Tensor,
    call: RouterCall,
    *,
    priority: torch.Tensor | None = None,
    fallback: tuple[torch.Tensor, torch.Tensor] | None = None,
    log_gate_TE: torch.Tensor | None = None,
) -> Routing:
    """Give every routed pair a slot in its expert, drop what exceeds the capacity, weight the rest.

    All first choices take their slots before all second choices and so on; within a choice the
    order is that of the tokens, or of decreasing priority. With a priority of every pair, that
    alone is the order. A pair that finds its expert full may take a fallback (:mod:`.overflow`).

    For K > 1 the K gate values are divided by their sum: with ``normalize_before_dropping`` over
    all K, otherwise over the pairs that were kept. For K = 1 (Switch Transformer, arXiv 2101.03961,
    eq. 2), and with ``unnormalized_weights``, the weight is the gate value itself. Dropped pairs
    have weight zero.

    Args:
        expert_TK: int32 [T, K], -1 for pairs that must not be routed.
        gate_TK: fp32 [T, K], differentiable; normalised with ``normalize_before_dropping``.
        priority: fp32 [T] or [T, K], larger goes first.
        fallback: int32 [T, R] next best experts of the tokens, -1 for none, and fp32 [T, R] their
            gate values, differentiable.
        log_gate_TE: fp32 [T, E], logarithms of all gate values up to a constant of each token, to
            normalise by however small the values are. Without them a sum counts as machine epsilon
            at least, as in fairseq's ``moe`` branch.
    """
    config, capacity = call.config, call.capacity
    num_experts, slots, num_full_K = config.num_experts, None, None
    by_pair = priority is not None and priority.dim() == 2
    reroutes = capacity is not None and fallback is not None
    if by_pair or reroutes:
        slots = position_TK, num_routed_KE = assign_positions(expert_TK, num_experts, priority)
        if by_pair and capacity is not None:
            num_full_K = (position_TK >= capacity).sum(0, dtype=torch.int32)
        if reroutes:
            expert_TK, position_TK, gate_TK, num_tried_KE = reroute(
                expert_TK, position_TK, gate_TK, num_routed_KE, fallback, capacity, priority
            )
            slots = position_TK, num_tried_KE
    as_they_are = config.unnormalized_weights or config.normalize_before_dropping
    normalize = expert_TK.shape[1] > 1 and not as_they_are
    dest_row_TK, src_pair_R, weight_TK, num_kept_per_expert_E, num_sorted_KE = ops.assign_rows(
        expert_TK,
        gate_TK,
        num_experts,
        capacity=capacity,
        padded=call.padded,
        normalize=normalize and log_gate_TE is None,
        priority_T=priority if slots is None else None,
        slots=slots,
    )
    if slots is None:
        num_routed_KE = num_sorted_KE
    if normalize and log_gate_TE is not None:
        weight_TK, _ = share_of_gates(log_gate_TE, expert_TK, dest_row_TK >= 0)
    if config.route_scale != 1:
        weight_TK = weight_TK * config.route_scale
    return Routing(
        expert_TK=expert_TK,
        dest_row_TK=dest_row_TK,
        src_pair_R=src_pair_R,
        topk_weight_TK=mask_at_random(weight_TK, config.expert_output_masking, call.training),
        num_routed_KE=num_routed_KE,
        num_kept_per_expert_E=num_kept_per_expert_E,
        capacity=capacity,
        padded=call.padded,
        num_full_K=num_full_K,
    )


def share_of_gates(
    log_gate_TE: torch.Tensor, expert_TK: torch.Tensor, valid_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate values of the valid choices over their sum, computed from logarithms.

    Returns:
        The shares [T, K], 0 of choices that are not, and the sums' logarithms [T, 1], inf where no
        choice is valid.
    """
    log_TK = log_gate_TE.gather(1, expert_TK.clamp(min=0).long())
    valid_TK = valid_TK & (log_TK > -torch.inf)
    log_TK = log_TK.masked_fill(~valid_TK, torch.finfo(log_TK.dtype).min)
    total_T1 = log_TK.logsumexp(1, keepdim=True)
    total_T1 = total_T1.masked_fill(~valid_TK.any(1, keepdim=True), torch.inf)
    return (log_TK - total_T1).exp(), total_T1


def mask_at_random(values: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Output masks (NLLB, arXiv 2207.04672, section 6.2.2): entries are zero with a probability.

    Not scaled in training; evaluation multiplies by the share that is kept, the expected value. A
    probability of 0 draws nothing.
    """
    if probability == 0:
        return values
    if not training:
        return values * (1 - probability)
    kept = torch.rand(values.shape, device=values.device) >= probability
    return torch.where(kept, values, 0)


def mask_tokens(y_TM: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """:func:`mask_at_random` of whole tokens, which then have their residual only."""
    if probability == 0:
        return y_TM
    return y_TM * mask_at_random(torch.ones_like(y_TM[:, :1]), probability, training)
