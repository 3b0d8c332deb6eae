"""Dispatch of tokens to expert rows, and back, in plain torch; see ``ops/dispatch.py``.

No T x E x C tensor appears: cost and memory are O((T K + R) M).
"""

import torch
from torch import Tensor

from .activation import acc_dtype

# Numbers per chunk: they stay in a core's cache.
_CHUNK = 1 << 19


def _pair_and_token(src_pair_R: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the pair and the token of each row, (R,) int64; arbitrary ones for an unused row.

    torch gathers twice as fast by int64 as by int32.
    """
    pair_R = src_pair_R.clamp(min=0).long()
    return pair_R, pair_R // top_k


def zero_unused(rows_RM: Tensor, src_pair_R: Tensor) -> Tensor:
    """Clear the unused rows in place, and return the rows."""
    if rows_RM.device.type != "cpu":  # nonzero would be a device-to-host sync
        return rows_RM.masked_fill_((src_pair_R < 0)[:, None], 0)
    if src_pair_R.numel() == 0 or src_pair_R.amin() >= 0:
        return rows_RM
    return rows_RM.index_fill_(0, (src_pair_R < 0).nonzero().view(-1), 0)


def dispatch_fwd(x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """Return rows[r] = x[src_pair[r] // K], zero in unused rows; (R, M) in x's dtype."""
    if dest_row_TK.numel() == 0:
        return x_TM.new_zeros((src_pair_R.shape[0], x_TM.shape[1]))
    _, token_R = _pair_and_token(src_pair_R, dest_row_TK.shape[1])
    return zero_unused(x_TM.index_select(0, token_R), src_pair_R)


def _bag_sum(rows_RM: Tensor, dest_row_TK: Tensor, weight: Tensor | None) -> Tensor:
    """Gather and sum weighted rows in one pass, without dropped pairs, by torch's embedding bag."""
    row_N, dtype = dest_row_TK.reshape(-1), dest_row_TK.dtype
    weight = None if weight is None else weight.reshape(-1)
    if row_N.amin() >= 0:
        offset_T = torch.arange(0, row_N.numel(), dest_row_TK.shape[1], dtype=dtype)
    else:
        valid_N, count_T = row_N >= 0, (dest_row_TK >= 0).sum(dim=1, dtype=dtype)
        row_N, offset_T = row_N[valid_N], count_T.cumsum(0, dtype=dtype) - count_T
        weight = None if weight is None else weight[valid_N]
    # torch.nn.functional.embedding_bag calls this function after 30 us of checks in Python
    return torch.embedding_bag(rows_RM, row_N, offset_T, per_sample_weights=weight)[0]


def _loop_sum(rows_RM: Tensor, dest_row_TK: Tensor, topk_weight_TK: Tensor | None) -> Tensor:
    acc = acc_dtype(rows_RM.dtype)
    y_TM = rows_RM.new_zeros((dest_row_TK.shape[0], rows_RM.shape[1]), dtype=acc)
    for k in range(dest_row_TK.shape[1]):
        row_T = dest_row_TK[:, k]
        part_TM = rows_RM.index_select(0, row_T.clamp(min=0)).to(acc)
        if topk_weight_TK is not None:
            part_TM = part_TM * topk_weight_TK[:, k, None].to(acc)
        # where, not a product with 0: a dropped pair must not carry a NaN over from row 0
        y_TM += part_TM.where((row_T >= 0)[:, None], 0)
    return y_TM.to(rows_RM.dtype)


def combine_fwd(
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    topk_weight_TK: Tensor | None,
    bias_EM: Tensor | None = None,
    expert_TK: Tensor | None = None,
) -> Tensor:
    """Return y[t] = sum over k with dest_row >= 0 of (weight or 1) * rows[dest_row[t, k]]; (T, M).

    With ``bias_EM`` and the pairs' experts ``expert_TK``, rows are rows + bias[expert]. Sums in
    fp32 (fp64 for fp64 rows) and returns the dtype of the rows.
    """
    if bias_EM is not None and topk_weight_TK is not None and expert_TK is not None:
        y_TM = combine_fwd(rows_RM.to(acc_dtype(rows_RM.dtype)), dest_row_TK, topk_weight_TK)
        weight_TE = _weight_by_expert(topk_weight_TK, dest_row_TK, expert_TK, bias_EM, y_TM.dtype)
        return y_TM.addmm_(weight_TE, bias_EM.to(y_TM.dtype)).to(rows_RM.dtype)
    if rows_RM.shape[0] == 0 or dest_row_TK.numel() == 0:
        return rows_RM.new_zeros((dest_row_TK.shape[0], rows_RM.shape[1]))
    same_dtype = topk_weight_TK is None or topk_weight_TK.dtype == rows_RM.dtype
    if rows_RM.device.type == "cpu" and rows_RM.dtype == torch.float32 and same_dtype:
        return _bag_sum(rows_RM, dest_row_TK, topk_weight_TK)
    return _loop_sum(rows_RM, dest_row_TK, topk_weight_TK)


def combine_bwd(
    dy_TM: Tensor,
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    topk_weight_TK: Tensor,
    bias_EM: Tensor | None = None,
    expert_TK: Tensor | None = None,
    *,
    needs_rows: bool = True,
    needs_weight: bool = True,
    needs_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`combine_fwd`: d_rows (R, M), d_weight (T, K), d_bias (E, M).

    d_rows[dest_row[t, k]] = weight[t, k] * dy[t]; d_weight[t, k] = <dy[t], rows[dest_row[t, k]]>;
    d_bias[e] = sum over kept pairs of weight[t, k] * dy[t]. A gradient that is not needed comes
    back with shape (0,), as d_bias of no bias.
    """
    d_bias_EM = rows_RM.new_empty(0)
    shares = needs_rows, needs_weight
    maps = dest_row_TK, src_pair_R, topk_weight_TK
    d_rows_RM, d_weight_TK = _combine_bwd_rows(dy_TM, rows_RM, *maps, *shares)
    if bias_EM is not None and expert_TK is not None:
        dy_TM = dy_TM.to(acc_dtype(dy_TM.dtype))
        if needs_weight:
            dot_TE = dy_TM @ bias_EM.to(dy_TM.dtype).t()
            dot_TK = dot_TE.gather(1, expert_TK.clamp(min=0).long())
            d_weight_TK = d_weight_TK.add_(dot_TK.masked_fill_(dest_row_TK < 0, 0))
        if needs_bias:
            weight_TE = _weight_by_expert(
                topk_weight_TK, dest_row_TK, expert_TK, bias_EM, dy_TM.dtype
            )
            d_bias_EM = torch.mm(weight_TE.t(), dy_TM).to(bias_EM.dtype)
    return d_rows_RM, d_weight_TK, d_bias_EM


def _weight_by_expert(topk_weight_TK, dest_row_TK, expert_TK, bias_EM, dtype) -> Tensor:
    """Return the weight of each token and expert, (T, E); that of dropped pairs counts as 0."""
    weight_TE = bias_EM.new_zeros((len(expert_TK), len(bias_EM)), dtype=dtype)
    weight_TK = topk_weight_TK.to(dtype).masked_fill(dest_row_TK < 0, 0)
    return weight_TE.scatter_add_(1, expert_TK.clamp(min=0).long(), weight_TK)


def _combine_bwd_rows(
    dy_TM, rows_RM, dest_row_TK, src_pair_R, topk_weight_TK, needs_rows, needs_weight
) -> tuple[Tensor, Tensor]:
    """Return d_rows and the part of d_weight without the bias."""
    d_rows_RM, d_weight_TK = rows_RM.new_empty(0), topk_weight_TK.new_empty(0)
    if dest_row_TK.numel() == 0:
        d_rows_RM = torch.zeros_like(rows_RM) if needs_rows else d_rows_RM
        return d_rows_RM, torch.zeros_like(topk_weight_TK) if needs_weight else d_weight_TK
    (num_rows, model_dim), acc = rows_RM.shape, acc_dtype(rows_RM.dtype)
    pair_R, token_R = _pair_and_token(src_pair_R, dest_row_TK.shape[1])
    weight_R = topk_weight_TK.reshape(-1).index_select(0, pair_R).to(acc)
    # one more entry, for dropped pairs
    dot_R, dy_RM = weight_R.new_zeros(num_rows + 1), dy_TM.new_empty(rows_RM.shape)
    step = max(1, _CHUNK // max(1, model_dim))
    for begin in range(0, num_rows, step):
        part = slice(begin, min(begin + step, num_rows))
        dy = torch.index_select(dy_TM, 0, token_R[part], out=dy_RM[part])
        if needs_weight:
            torch.sum(dy.to(acc) * rows_RM[part], 1, out=dot_R[part])
        if needs_rows:
            dy.mul_(weight_R[part, None])  # in fp32, rounded once
    if needs_weight:
        dot_N = dot_R[dest_row_TK.reshape(-1).long()]
        d_weight_TK = dot_N.to(topk_weight_TK.dtype).view(dest_row_TK.shape)
    return zero_unused(dy_RM, src_pair_R) if needs_rows else d_rows_RM, d_weight_TK


def dispatch_bwd(d_rows_RM: Tensor, dest_row_TK: Tensor) -> Tensor:
    """Return the gradient of :func:`dispatch_fwd`, (T, M): the sum of each token's rows."""
    return combine_fwd(d_rows_RM, dest_row_TK, None)
