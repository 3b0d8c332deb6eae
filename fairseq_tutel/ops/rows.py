"""Operator that gives each kept (token, choice) pair its row and its weight."""

from typing import Optional

from torch import Tensor

from ._operator import check_indices, check_shape, operator
from .backend import implementation


def _fake_rows(expert, position, gate, num_routed, capacity, padded, normalize):
    (T, K), E = expert.shape, num_routed.shape[1]
    src_pair_R = expert.new_empty((E * capacity if padded else T * K,))
    return expert.new_empty((T, K)), src_pair_R, gate.new_empty((T, K)), expert.new_empty((E,))


@operator("assign_rows", _fake_rows)
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


@operator("assign_rows_bwd", lambda d_weight, gate, dest_row, normalize: gate.new_empty(gate.shape))
def _assign_rows_bwd(d_weight: Tensor, gate: Tensor, dest_row: Tensor, normalize: bool) -> Tensor:
    gradient = implementation("assign_rows_bwd", gate)
    return gradient(d_weight, gate, dest_row, normalize=normalize)


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
    check_indices("expert", expert_TK, "tokens", "top_k")
    check_shape("position", position_in_expert_TK, expert_TK.shape)
    check_shape("gate", gate_TK, expert_TK.shape)
    if padded and capacity is None:
        raise ValueError("a padded layout needs a capacity")
    return _assign_rows(
        expert_TK, position_in_expert_TK, gate_TK, num_routed_KE, capacity, padded, normalize
    )
