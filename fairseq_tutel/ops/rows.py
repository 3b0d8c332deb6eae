"""Operator that gives each kept (token, choice) pair its row and its weight."""

from typing import Optional

import torch
from torch import Tensor

from .backend import implementation


@torch.library.custom_op("fairseq_tutel::assign_rows", mutates_args=())
def _assign_rows(
    expert: Tensor,
    position: Tensor,
    gate: Tensor,
    num_routed: Tensor,
    capacity: Optional[int],
    padded: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return implementation("assign_rows_fwd", gate)(
        expert, position, gate, num_routed, capacity=capacity, padded=padded, normalize=normalize
    )


@_assign_rows.register_fake
def _(expert, position, gate, num_routed, capacity, padded, normalize):
    num_experts = num_routed.shape[1]
    num_rows = num_experts * capacity if padded else expert.shape[0] * expert.shape[1]
    return (
        expert.new_empty(expert.shape),
        expert.new_empty((num_rows,)),
        gate.new_empty(gate.shape),
        expert.new_empty((num_experts,)),
    )


@torch.library.custom_op("fairseq_tutel::assign_rows_bwd", mutates_args=())
def _assign_rows_bwd(d_weight: Tensor, gate: Tensor, dest_row: Tensor, normalize: bool) -> Tensor:
    gradient = implementation("assign_rows_bwd", gate)
    return gradient(d_weight, gate, dest_row, normalize=normalize)


@_assign_rows_bwd.register_fake
def _(d_weight, gate, dest_row, normalize):
    return gate.new_empty(gate.shape)


def _setup(ctx, inputs, output):
    dest_row, src_pair, _, num_kept = output
    ctx.mark_non_differentiable(dest_row, src_pair, num_kept)
    ctx.set_materialize_grads(False)
    ctx.normalize = inputs[-1]
    ctx.save_for_backward(inputs[2], dest_row)


def _backward(ctx, d_dest_row, d_src_pair, d_weight, d_num_kept):
    if d_weight is None:
        return (None,) * 7
    d_gate = _assign_rows_bwd(d_weight, *ctx.saved_tensors, ctx.normalize)
    return None, None, d_gate, None, None, None, None


_assign_rows.register_autograd(_backward, setup_context=_setup)


def assign_rows(
    expert_TK: Tensor,
    position_in_expert_TK: Tensor,
    gate_TK: Tensor,
    num_routed_KE: Tensor,
    *,
    capacity: int | None,
    padded: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of the pairs within capacity, in both directions, and their weights.

    Args:
        expert_TK: (T, K) int32, -1 = not routed.
        position_in_expert_TK: (T, K) int32, -1 = not routed (:func:`assign_slots`).
        gate_TK: (T, K) fp32; differentiable.
        num_routed_KE: (K, E) int32, pairs per choice and expert.
        capacity: most rows per expert, or None.
        padded: expert e owns the rows from e * capacity on; else its rows follow those of the
            expert before it.
        normalize: divide a token's weights by their sum over the kept pairs, at least epsilon.

    Returns:
        dest_row_TK: (T, K) int32, -1 = not kept.
        src_pair_R: (R,) int32, its inverse t * K + k, -1 in unused rows; R is E * capacity where
            padded, else T * K.
        topk_weight_TK: (T, K) fp32, 0 = not kept; carries the gradient.
        num_kept_per_expert_E: (E,) int32.

    Raises:
        ValueError: a tensor of a wrong shape or dtype, or padded without a capacity.
    """
    if expert_TK.dim() != 2 or expert_TK.dtype != torch.int32:
        raise ValueError(
            f"expert must be (tokens, top_k) int32, got {tuple(expert_TK.shape)} {expert_TK.dtype}"
        )
    for name, tensor in (("position", position_in_expert_TK), ("gate", gate_TK)):
        if tensor.shape != expert_TK.shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must have the shape of expert "
                f"{tuple(expert_TK.shape)}"
            )
    if padded and capacity is None:
        raise ValueError("a padded layout needs a capacity")
    return _assign_rows(
        expert_TK, position_in_expert_TK, gate_TK, num_routed_KE, capacity, padded, normalize
    )
