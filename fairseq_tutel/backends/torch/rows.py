"""Rows and weights of (token, choice) pairs in plain torch; rows on a CPU in numpy (slots.py)."""

import numpy as np
import torch
from torch import Tensor


def assign_rows_fwd(
    expert_TK: Tensor,
    position_in_expert_TK: Tensor,
    gate_TK: Tensor,
    num_routed_KE: Tensor,
    *,
    capacity: int | None,
    padded: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results as in :func:`fairseq_tutel.ops.assign_rows`."""
    rows = _rows_on_cpu if gate_TK.device.type == "cpu" else _rows
    dest_row_TK, src_pair_R, num_kept_E, kept_TK = rows(
        expert_TK, position_in_expert_TK, num_routed_KE, capacity, padded
    )
    weight_TK = gate_TK * kept_TK
    if normalize:
        weight_TK /= _at_least_epsilon(weight_TK.sum(1, keepdim=True))
    return dest_row_TK, src_pair_R, weight_TK, num_kept_E


def _rows(expert_TK, position_TK, num_routed_KE, capacity, padded):
    num_kept_E = num_routed_KE.sum(0, dtype=torch.int32)
    kept_TK = position_TK >= 0
    if capacity is not None:
        num_kept_E.clamp_(max=capacity)
        kept_TK &= position_TK < capacity
    if padded:
        row_TK, num_rows = expert_TK * capacity, len(num_kept_E) * capacity
    else:
        first_row_E = num_kept_E.cumsum(0, dtype=torch.int32) - num_kept_E
        row_TK, num_rows = first_row_E[expert_TK.clamp(min=0).long()], expert_TK.numel()
    dest_row_TK = row_TK.add_(position_TK).masked_fill_(~kept_TK, -1)
    row_N = dest_row_TK.reshape(-1).long()
    # Dropped pairs land in one extra row that is cut off.
    src_pair_R = dest_row_TK.new_full((num_rows + 1,), -1)
    pair_N = torch.arange(row_N.numel(), dtype=dest_row_TK.dtype, device=row_N.device)
    src_pair_R.scatter_(0, row_N.masked_fill_(row_N < 0, num_rows), pair_N)
    return dest_row_TK, src_pair_R[:num_rows], num_kept_E, kept_TK


def _rows_on_cpu(expert_TK, position_TK, num_routed_KE, capacity, padded):
    expert_TK, position_TK = (each.contiguous().numpy() for each in (expert_TK, position_TK))
    num_kept_E = num_routed_KE.numpy().sum(0, dtype=np.int32)
    kept_TK = position_TK >= 0
    if capacity is not None:
        # a larger one drops nothing either, and may not be an int32
        num_kept_E = num_kept_E.clip(max=np.int32(min(capacity, expert_TK.size)))
        kept_TK &= position_TK < capacity
    if padded:
        first_row_E = np.arange(len(num_kept_E), dtype=np.int32) * np.int32(capacity)
        num_rows = len(num_kept_E) * capacity
    else:
        first_row_E = num_kept_E.cumsum(dtype=np.int32) - num_kept_E
        num_rows = expert_TK.size
    dest_row_TK = np.where(kept_TK, first_row_E[expert_TK] + position_TK, np.int32(-1))
    # -1 is the last row here: an extra one that is cut off
    src_pair_R = np.full(num_rows + 1, -1, np.int32)
    src_pair_R[dest_row_TK.ravel()] = np.arange(dest_row_TK.size, dtype=np.int32)
    found = dest_row_TK, src_pair_R[:num_rows], num_kept_E, kept_TK
    return tuple(map(torch.from_numpy, found))


def assign_rows_bwd(
    d_weight_TK: Tensor, gate_TK: Tensor, dest_row_TK: Tensor, *, normalize: bool
) -> Tensor:
    """Gradient of the gate values.

    With s the sum of a token's kept gate values: d_gate = kept * (d_w - <d_w, w>) / s; below
    epsilon the divisor is a constant.
    """
    kept_TK = dest_row_TK >= 0
    d_gate_TK = d_weight_TK * kept_TK
    if normalize:
        weight_TK = gate_TK * kept_TK
        total_T1 = weight_TK.sum(1, keepdim=True)
        divisor_T1 = _at_least_epsilon(total_T1)
        inner_T1 = (d_gate_TK * weight_TK).sum(1, keepdim=True) / divisor_T1
        inner_T1.masked_fill_(total_T1 < divisor_T1, 0)
        d_gate_TK = d_gate_TK.sub_(inner_T1).div_(divisor_T1).mul_(kept_TK)
    return d_gate_TK


def _at_least_epsilon(total: Tensor) -> Tensor:
    return total.clamp(min=torch.finfo(total.dtype).eps)
