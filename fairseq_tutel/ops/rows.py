"""Operator that gives each kept (token, choice) pair its row and its weight."""

from typing import Optional

from torch import Tensor

from ._operator import check_indices, check_shape, operator
from .backend import implementation


def _fake_rows(
    expert, gate, num_experts, capacity, padded, normalize, priority, position, num_routed
):
    (T, K), E = expert.shape, num_experts
    src_pair_R = expert.new_empty((E * capacity if padded else T * K,))
    counts = [(E,), (0 if padded else E,), (K if num_routed is None else 0, E)]
    maps = expert.new_empty((T, K)), src_pair_R, gate.new_empty((T, K))
    return *maps, *(expert.new_empty(shape) for shape in counts)


@operator("assign_rows", _fake_rows)
def _assign_rows(
    expert: Tensor,
    gate: Tensor,
    num_experts: int,
    capacity: Optional[int],
    padded: bool,
    normalize: bool,
    priority: Optional[Tensor],
    position: Optional[Tensor],
    num_routed: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = {"capacity": capacity, "padded": padded, "normalize": normalize}
    if num_routed is None:
        sort_pairs = implementation("sort_pairs_fwd", gate)
        return sort_pairs(expert, gate, num_experts, priority_T=priority, **layout)
    found = implementation("assign_rows_fwd", gate)(expert, position, gate, num_routed, **layout)
    return *found, num_routed.new_empty((0, num_experts))  # no operator returns an argument


@operator("assign_rows_bwd", lambda d_weight, gate, dest_row, normalize: gate.new_empty(gate.shape))
def _assign_rows_bwd(d_weight: Tensor, gate: Tensor, dest_row: Tensor, normalize: bool) -> Tensor:
    return implementation("assign_rows_bwd", gate)(d_weight, gate, dest_row, normalize=normalize)


def _setup(ctx, inputs, output):
    dest_row, src_pair, _, num_kept, row_end, num_routed = output
    ctx.mark_non_differentiable(dest_row, src_pair, num_kept, row_end, num_routed)
    ctx.set_materialize_grads(False)
    ctx.normalize = inputs[5]
    ctx.save_for_backward(inputs[1], dest_row)


def _backward(ctx, d_dest_row, d_src_pair, d_weight, *d_counts):
    if d_weight is None:
        return (None,) * 9
    d_gate = _assign_rows_bwd(d_weight, *ctx.saved_tensors, ctx.normalize)
    return None, d_gate, *(None,) * 7


_assign_rows.register_autograd(_backward, setup_context=_setup)


def assign_rows(
    expert_TK: Tensor,
    gate_TK: Tensor,
    num_experts: int,
    *,
    capacity: int | None,
    padded: bool,
    normalize: bool,
    priority_T: Tensor | None = None,
    slots: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Assign rows and weights to the (token, choice) pairs within capacity.

    Pairs take the slots of :func:`assign_slots`, or the given ones.

    Args:
        expert_TK: (T, K) int32, -1 = not routed.
        gate_TK: (T, K) fp32; differentiable.
        num_experts: E.
        capacity: most rows per expert, or None.
        padded: expert e owns the rows from e * capacity on; else its rows follow those of the
            expert before it.
        normalize: divide a token's weights by their sum over the kept pairs, at least epsilon.
        priority_T: (T,) float, or None: priorities for :func:`assign_slots`. Not with slots.
        slots: results of :func:`assign_slots`: (T, K) int32 positions in experts, -1 = not routed,
            and (K, E) int32 pairs per choice and expert, of which only the sum over choices
            matters.

    Returns:
        dest_row_TK: (T, K) int32, -1 = not kept.
        src_pair_R: (R,) int32, its inverse t * K + k, -1 in unused rows; R is E * capacity if
            padded, else T * K.
        topk_weight_TK: (T, K) fp32, 0 = not kept; carries the gradient.
        num_kept_per_expert_E: (E,) int32.
        row_end_E: (E,) int32, end of each expert's rows, for :func:`expert_ffn`; (0,) if padded.
        num_routed_KE: (K, E) int32, pairs per choice and expert; the given ones with ``slots``.
    """
    check_indices("expert", expert_TK, "tokens", "top_k")
    check_shape("gate", gate_TK, expert_TK.shape)
    check_shape("priority", priority_T, expert_TK.shape[:1])
    if padded and capacity is None:
        raise ValueError("a padded layout needs a capacity")
    position_TK = num_given_KE = None
    if slots is not None:
        if priority_T is not None:
            raise ValueError("slots have their order already: give a priority to assign_slots")
        position_TK, num_given_KE = slots
        check_shape("position", position_TK, expert_TK.shape)
        check_shape("num_routed", num_given_KE, (expert_TK.shape[1], num_experts))
    priority_T = None if priority_T is None else priority_T.detach()
    layout = capacity, padded, normalize
    *found, num_routed_KE = _assign_rows(
        expert_TK, gate_TK, num_experts, *layout, priority_T, position_TK, num_given_KE
    )
    dest_row_TK, src_pair_R, weight_TK, num_kept_E, row_end_E = found
    num_routed_KE = num_routed_KE if num_given_KE is None else num_given_KE
    return dest_row_TK, src_pair_R, weight_TK, num_kept_E, row_end_E, num_routed_KE
