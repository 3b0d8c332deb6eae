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
from .output_masks import mask_at_random
from .overflow import reroute, take_slots


@dataclass(frozen=True)
class RouterStep:
    """What a router needs of one forward pass beside its tokens.

    Attributes:
        config: the options of this call.
        training: whether the layer is in training mode.
        num_tokens: T that all ranks agreed on, the largest of theirs.
        num_sequences: B; this rank's tokens are B sequences of one length, one after the other.
        compact: whether rows are laid out by need, also where the capacity is fixed.
    """

    config: MoEConfig
    training: bool
    num_tokens: int
    num_sequences: int = 1
    compact: bool = False

    @property
    def capacity(self) -> int | None:
        """C, most tokens that this rank may send to one expert; None where nothing is dropped."""
        return self.config.capacity(self.num_tokens, self.training)

    @property
    def padded(self) -> bool:
        """Whether rows are laid out by the capacity, see the module docstring."""
        return not self.compact and self.config.is_static(self.training)


class Routing(NamedTuple):
    """The routing of T tokens of one rank to K of E experts each.

    A tuple, because hooks that torch runs on a router's output (fairseq's search for the module of
    a NaN, for one) look for tensors in tuples.

    Attributes:
        expert_TK: int32 expert of each choice, after re-routing; -1 where the choice is not routed
            (padding, rejected).
        dest_row_TK: int32 row of the send buffer, -1 where not routed or over capacity.
        src_pair_R: int32 flat index t*K+k of the pair in each row, -1 in unused rows.
        topk_weight_TK: fp32 combine weight, 0 where dest_row_TK is -1; carries the gate's
            gradient.
        num_routed_KE: int32 routed pairs per choice and expert, before dropping and re-routing.
        num_kept_per_expert_E: int32 rows that each expert receives from this rank, after dropping.
        capacity: C, or None where nothing is dropped.
        padded: the layout.
        num_full_K: int32, pairs of each choice that found their expert full, where the order of
            slots is not that of the choices; else None.
    """

    expert_TK: torch.Tensor
    dest_row_TK: torch.Tensor
    src_pair_R: torch.Tensor
    topk_weight_TK: torch.Tensor
    num_routed_KE: torch.Tensor
    num_kept_per_expert_E: torch.Tensor
    capacity: int | None
    padded: bool
    num_full_K: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.num_routed_KE.shape[1]

    @property
    def kept_TK(self) -> torch.Tensor:
        """bool, which pairs reach an expert."""
        return self.dest_row_TK >= 0


def build_routing(
    expert_TK: torch.Tensor,
    gate_TK: torch.Tensor,
    step: RouterStep,
    *,
    priority: torch.Tensor | None = None,
    spare_expert_TR: torch.Tensor | None = None,
    spare_gate_TR: torch.Tensor | None = None,
) -> Routing:
    """Give every routed pair a slot in its expert, drop what exceeds the capacity, weight the rest.

    All first choices take their slots before all second choices and so on; within a choice the
    order is that of the tokens, or of decreasing priority. With a priority of every pair, that
    alone is the order. A pair that finds its expert full may take a spare one (:mod:`.overflow`).

    For K > 1 the K gate values are divided by their sum: with ``normalize_before_dropping`` over
    all K, otherwise over the pairs that were kept, so that a token whose second expert is full
    gives its first the weight 1. For K = 1 the weight is the gate value itself (Switch Transformer,
    arXiv 2101.03961, eq. 2). A token whose pairs are all dropped gets weights of zero: the layer
    adds nothing to its residual.

    Args:
        expert_TK: int32 [T, K], -1 for pairs that must not be routed.
        gate_TK: fp32 [T, K], differentiable; already normalised if
            ``step.config.normalize_before_dropping``.
        step: with the number of experts, and the rows that an expert has.
        priority: fp32 [T] or [T, K], larger goes first.
        spare_expert_TR, spare_gate_TR: next best experts of the tokens and their gate values.
    """
    num_experts, capacity = step.config.num_experts, step.capacity
    position_TK, num_routed_KE = take_slots(expert_TK, num_experts, priority)
    num_full_K = None
    if capacity is not None and priority is not None and priority.dim() == 2:
        num_full_K = (position_TK >= capacity).sum(0, dtype=torch.int32)
    num_tried_KE = num_routed_KE
    if capacity is not None and spare_expert_TR is not None:
        expert_TK, position_TK, gate_TK, num_tried_KE = reroute(
            expert_TK,
            position_TK,
            gate_TK,
            num_routed_KE,
            spare_expert_TR=spare_expert_TR,
            spare_gate_TR=spare_gate_TR,
            capacity=capacity,
            priority=priority,
        )
    dest_row_TK, src_pair_R, topk_weight_TK, num_kept_per_expert_E = ops.assign_rows(
        expert_TK,
        position_TK,
        gate_TK,
        num_tried_KE,
        capacity=capacity,
        padded=step.padded,
        normalize=expert_TK.shape[1] > 1 and not step.config.normalize_before_dropping,
    )
    if step.config.route_scale != 1:
        topk_weight_TK = topk_weight_TK * step.config.route_scale
    masked = step.config.expert_output_masking
    topk_weight_TK = mask_at_random(topk_weight_TK, masked, step.training)
    return Routing(
        expert_TK=expert_TK,
        dest_row_TK=dest_row_TK,
        src_pair_R=src_pair_R,
        topk_weight_TK=topk_weight_TK,
        num_routed_KE=num_routed_KE,
        num_kept_per_expert_E=num_kept_per_expert_E,
        capacity=capacity,
        padded=step.padded,
        num_full_K=num_full_K,
    )


def sum_of_gates(gate_TK: torch.Tensor) -> torch.Tensor:
    """[T, 1], sum of the K values of each token, at least machine epsilon."""
    return gate_TK.sum(1, keepdim=True).clamp(min=torch.finfo(gate_TK.dtype).eps)
