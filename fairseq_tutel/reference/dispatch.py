"""Tokens to expert rows and back in plain torch.

Legend: T tokens, K top-k, M model dim, R rows. ``row_TK`` maps a (token, choice) pair to its
row (-1 = dropped) and ``pair_R`` is its inverse (-1 = unused row). No T x E x C tensor appears:
cost and memory are O((T K + R) M).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _row_weight(weight_TK: Tensor, pair_R: Tensor) -> Tensor:
    """(R, 1) weight of the pair in each row; unused rows get some pair's weight."""
    return weight_TK.reshape(-1).index_select(0, pair_R.clamp(min=0))[:, None]


def _gather_tokens(x_TM: Tensor, pair_R: Tensor, top_k: int) -> Tensor:
    return x_TM.index_select(0, pair_R.clamp(min=0) // top_k)


def _zero_unused(rows_RM: Tensor, pair_R: Tensor) -> Tensor:
    return rows_RM.index_fill_(0, (pair_R < 0).nonzero().view(-1), 0)


def _scale(rows_RM: Tensor, weight_R1: Tensor) -> Tensor:
    """rows * weight, multiplied in fp32 for half types; reuses ``rows_RM`` where it can."""
    if rows_RM.dtype == weight_R1.dtype:
        return rows_RM.mul_(weight_R1)
    acc = _acc_dtype(rows_RM.dtype)
    return (rows_RM.to(acc) * weight_R1.to(acc)).to(rows_RM.dtype)


def dispatch_fwd(
    x_TM: Tensor, row_TK: Tensor, pair_R: Tensor, weight_TK: Tensor | None = None
) -> Tensor:
    """rows_RM[r] = (weight or 1) * x[pair[r] // K], zero in unused rows; (R, M) in x's dtype."""
    if x_TM.shape[0] == 0 or row_TK.shape[1] == 0:
        return x_TM.new_zeros((pair_R.shape[0], x_TM.shape[1]))
    rows_RM = _gather_tokens(x_TM, pair_R, row_TK.shape[1])
    if weight_TK is not None:
        rows_RM = _scale(rows_RM, _row_weight(weight_TK, pair_R))
    return _zero_unused(rows_RM, pair_R)


def _bag_sum(rows_RM: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Weighted gather-sum in one pass by torch's embedding bag; dropped pairs are left out."""
    valid_TK = row_TK >= 0
    if bool(valid_TK.all()):
        return F.embedding_bag(row_TK, rows_RM, mode="sum", per_sample_weights=weight_TK)
    count_T = valid_TK.sum(dim=1, dtype=row_TK.dtype)
    offset_T = count_T.cumsum(0, dtype=row_TK.dtype) - count_T
    weight_N = None if weight_TK is None else weight_TK[valid_TK]
    return F.embedding_bag(
        row_TK[valid_TK], rows_RM, offset_T, mode="sum", per_sample_weights=weight_N
    )


def _loop_sum(rows_RM: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    acc = _acc_dtype(rows_RM.dtype)
    y_TM = rows_RM.new_zeros((row_TK.shape[0], rows_RM.shape[1]), dtype=acc)
    for k in range(row_TK.shape[1]):
        row_T = row_TK[:, k]
        part_TM = rows_RM.index_select(0, row_T.clamp(min=0)).to(acc)
        if weight_TK is not None:
            part_TM = part_TM * weight_TK[:, k, None].to(acc)
        # where, not a product with 0: a dropped pair must not carry a NaN over from row 0
        y_TM += part_TM.where((row_T >= 0)[:, None], 0)
    return y_TM.to(rows_RM.dtype)


def combine_fwd(
    rows_RM: Tensor, row_TK: Tensor, pair_R: Tensor, weight_TK: Tensor | None
) -> Tensor:
    """y_TM[t] = sum over k with row >= 0 of (weight or 1) * rows[row[t, k]]; (T, M).

    Sums in fp32 (fp64 for fp64 rows) and returns the dtype of the rows.
    """
    if rows_RM.shape[0] == 0 or row_TK.numel() == 0:
        return rows_RM.new_zeros((row_TK.shape[0], rows_RM.shape[1]))
    same_dtype = weight_TK is None or weight_TK.dtype == rows_RM.dtype
    if rows_RM.device.type == "cpu" and rows_RM.dtype == torch.float32 and same_dtype:
        return _bag_sum(rows_RM, row_TK, weight_TK)
    return _loop_sum(rows_RM, row_TK, weight_TK)


def _row_dot(a_RM: Tensor, b_RM: Tensor, row_TK: Tensor, pair_R: Tensor) -> Tensor:
    """(T, K) scalar product of the two rows of each pair, 0 for dropped pairs."""
    acc = _acc_dtype(a_RM.dtype)
    dot_R = torch.linalg.vecdot(a_RM.to(acc), b_RM.to(acc))
    used_R = (pair_R >= 0).nonzero().view(-1)
    dot_N = dot_R.new_zeros(row_TK.numel())
    dot_N.index_copy_(0, pair_R[used_R].long(), dot_R[used_R])
    return dot_N.view(row_TK.shape)


def combine_bwd(
    dy_TM: Tensor, rows_RM: Tensor, row_TK: Tensor, pair_R: Tensor, weight_TK: Tensor,
    *, needs_rows: bool = True, needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`combine_fwd`: d_rows (R, M) and d_weight (T, K) in weight's dtype.

    d_rows[row[t, k]] = weight[t, k] * dy[t]; d_weight[t, k] = <dy[t], rows[row[t, k]]>.
    A gradient that is not needed comes back with shape (0,).
    """
    d_rows_RM, d_weight_TK = rows_RM.new_empty(0), weight_TK.new_empty(0)
    if dy_TM.shape[0] == 0 or row_TK.shape[1] == 0:
        return torch.zeros_like(rows_RM), torch.zeros_like(weight_TK)
    gathered_RM = _gather_tokens(dy_TM, pair_R, row_TK.shape[1])
    if needs_weight:
        dot_TK = _row_dot(gathered_RM, rows_RM, row_TK, pair_R)
        d_weight_TK = dot_TK.to(weight_TK.dtype)
    if needs_rows:
        d_rows_RM = _scale(gathered_RM, _row_weight(weight_TK, pair_R))
        d_rows_RM = _zero_unused(d_rows_RM, pair_R)
    return d_rows_RM, d_weight_TK


def dispatch_bwd(
    d_rows_RM: Tensor, x_TM: Tensor, row_TK: Tensor, pair_R: Tensor,
    weight_TK: Tensor | None = None, *, needs_x: bool = True, needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`dispatch_fwd`: d_x (T, M) and d_weight (T, K).

    d_x[t] = sum over k of (weight or 1) * d_rows[row[t, k]];
    d_weight[t, k] = <x[t], d_rows[row[t, k]]>.
    A gradient that is not needed comes back with shape (0,).
    """
    d_x_TM, d_weight_TK = x_TM.new_empty(0), x_TM.new_empty(0)
    if needs_x:
        d_x_TM = combine_fwd(d_rows_RM, row_TK, pair_R, weight_TK)
    if needs_weight and weight_TK is not None:
        if x_TM.shape[0] == 0 or row_TK.shape[1] == 0:
            return d_x_TM, torch.zeros_like(weight_TK)
        gathered_RM = _gather_tokens(x_TM, pair_R, row_TK.shape[1])
        dot_TK = _row_dot(gathered_RM, d_rows_RM, row_TK, pair_R)
        d_weight_TK = dot_TK.to(weight_TK.dtype)
    return d_x_TM, d_weight_TK
