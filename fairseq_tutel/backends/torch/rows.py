"""Rows and weights of (token, choice) pairs in plain torch."""

import torch
from torch import Tensor

from .slots import assign_slots


def assign_rows_fwd(
    expert_TK: Tensor,
    position_in_expert_TK: Tensor,
    gate_TK: Tensor,
    num_routed_KE: Tensor,
    *,
    capacity: int | None,
    padded: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the rows, their inverse, the weights, and by expert kept pairs and ends of rows.

    Arguments and results are those of :func:`fairseq_tutel.ops.assign_rows`.
    """
    num_experts = num_routed_KE.shape[1]
    num_kept_E = num_routed_KE.sum(0, dtype=torch.int32)
    kept_TK = position_in_expert_TK >= 0
    if capacity is not None:
        num_kept_E.clamp_(max=capacity)
        kept_TK &= position_in_expert_TK < capacity
    end_E = num_kept_E.new_empty(0)
    if padded:
        row_TK, num_rows = expert_TK * capacity, num_experts * capacity
    else:
        end_E = num_kept_E.cumsum(0, dtype=torch.int32)
        first_row_E = end_E - num_kept_E
        row_TK, num_rows = first_row_E[expert_TK.clamp(min=0).long()], expert_TK.numel()
    dest_row_TK = row_TK.add_(position_in_expert_TK).masked_fill_(~kept_TK, -1)
    weight_TK = gate_TK * kept_TK
    if normalize:
        weight_TK /= _at_least_epsilon(weight_TK.sum(1, keepdim=True))
    return dest_row_TK, source_of_rows(dest_row_TK, num_rows), weight_TK, num_kept_E, end_E


def sort_pairs_fwd(
    expert_TK: Tensor, gate_TK: Tensor, num_experts: int, *, priority_T: Tensor | None, **layout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of :func:`assign_rows_fwd` with new slots, and the pairs per choice and
    expert.
    """
    position_TK, num_routed_KE = assign_slots(expert_TK, num_experts, priority_T=priority_T)
    found = assign_rows_fwd(expert_TK, position_TK, gate_TK, num_routed_KE, **layout)
    return *found, num_routed_KE


def assign_rows_bwd(
    d_weight_TK: Tensor, gate_TK: Tensor, dest_row_TK: Tensor, *, normalize: bool
) -> Tensor:
    """Return the gradient of the gate values.

    With s the sum of a token's kept gate values: d_gate = kept * (d_w - <d_w, w>) / s; below
    epsilon the divisor is a constant.
    """
    kept_TK = dest_row_TK >= 0
    if not normalize:
        return d_weight_TK * kept_TK
    gate_TK = gate_TK * kept_TK
    total_T1 = gate_TK.sum(1, keepdim=True)
    divisor_T1 = _at_least_epsilon(total_T1)
    inner_T1 = (d_weight_TK * gate_TK).sum(1, keepdim=True) / divisor_T1
    inner_T1.masked_fill_(total_T1 < divisor_T1, 0)
    return (d_weight_TK - inner_T1).div_(divisor_T1).mul_(kept_TK)


def _at_least_epsilon(total: Tensor) -> Tensor:
    return total.clamp(min=torch.finfo(total.dtype).eps)


def source_of_rows(dest_row_TK: Tensor, num_rows: int) -> Tensor:
    """Return the flat pair index t * K + k of each row, -1 for an unused row."""
    row_N = dest_row_TK.reshape(-1).long()
    # Dropped pairs land in one extra row that is cut off.
    src_pair_R = dest_row_TK.new_full((num_rows + 1,), -1)
    pair_N = torch.arange(row_N.numel(), dtype=dest_row_TK.dtype, device=row_N.device)
    src_pair_R.scatter_(0, row_N.masked_fill_(row_N < 0, num_rows), pair_N)
    return src_pair_R[:num_rows]
