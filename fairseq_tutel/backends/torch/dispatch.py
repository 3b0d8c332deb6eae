"""Tokens to expert rows and back in plain torch.

``dest_row_TK`` maps a (token, choice) pair to its row (-1 = dropped) and ``src_pair_R`` is its
inverse (-1 = unused row). No T x E x C tensor appears: cost and memory are O((T K + R) M).

Rows are worked through in blocks that stay in the cache, so that gathering, scaling and the
scalar products read and write memory once; on a CPU threads take whole blocks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._threads import parallel_for, small_on_one_thread

# Elements per block of rows: 1 MiB of fp32.
_BLOCK_NUMEL = 1 << 18


def _acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _for_each_block(rows_RM: Tensor, function: Callable[[slice], None]) -> None:
    """Call the function with blocks of row numbers that together are all rows."""
    num_rows, dim = rows_RM.shape
    step = max(1, _BLOCK_NUMEL // max(1, dim)) if rows_RM.device.type == "cpu" else num_rows
    starts = range(0, num_rows, max(1, step))

    def run(numbers):
        for number in numbers:
            function(slice(starts[number], min(starts[number] + step, num_rows)))

    parallel_for(run, len(starts))


def _row_weight(topk_weight_TK: Tensor, src_pair_R: Tensor, dtype: torch.dtype) -> Tensor:
    """(R, 1) weight of the pair in each row; unused rows get some pair's weight."""
    weight_R = topk_weight_TK.reshape(-1).index_select(0, src_pair_R.clamp(min=0))
    return weight_R.to(_acc_dtype(dtype))[:, None]


def _zero_unused(rows_RM: Tensor, src_pair_R: Tensor) -> None:
    unused_R = src_pair_R < 0
    if rows_RM.device.type == "cpu":
        rows_RM.index_fill_(0, unused_R.nonzero().view(-1), 0)
    else:  # nonzero would be a device-to-host sync
        rows_RM.masked_fill_(unused_R[:, None], 0)


def _pair_values(value_R: Tensor, topk_weight_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """(T, K) value of each pair's row in the dtype of the weights, 0 for dropped pairs."""
    num_pairs = topk_weight_TK.numel()
    # Unused rows land in one extra entry that is cut off.
    value_N = topk_weight_TK.new_zeros(num_pairs + 1)
    index_R = src_pair_R.long().masked_fill_(src_pair_R < 0, num_pairs)
    value_N.scatter_(0, index_R, value_R.to(topk_weight_TK.dtype))
    return value_N[:num_pairs].view(topk_weight_TK.shape)


def _gather(x_TM: Tensor, token_R: Tensor, out_RM: Tensor) -> Tensor:
    """x[token] in fp32 (fp64 for fp64): in ``out_RM`` if that has this dtype, else a new one."""
    if out_RM.dtype == _acc_dtype(x_TM.dtype):
        return torch.index_select(x_TM, 0, token_R, out=out_RM)
    return x_TM.index_select(0, token_R).to(_acc_dtype(x_TM.dtype))


def dispatch_fwd(x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """rows_RM[r] = x[src_pair[r] // K], zero in unused rows; (R, M) in x's dtype."""
    return _fill_rows(x_TM, dest_row_TK, src_pair_R, None)


def _fill_rows(
    x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor, topk_weight_TK: Tensor | None
) -> Tensor:
    if dest_row_TK.numel() == 0:
        return x_TM.new_zeros((src_pair_R.shape[0], x_TM.shape[1]))
    token_R = src_pair_R.clamp(min=0) // dest_row_TK.shape[1]
    rows_RM = x_TM.new_empty((src_pair_R.shape[0], x_TM.shape[1]))
    weight_R1 = (
        None if topk_weight_TK is None else _row_weight(topk_weight_TK, src_pair_R, x_TM.dtype)
    )

    def fill(rows):
        if weight_R1 is None:
            torch.index_select(x_TM, 0, token_R[rows], out=rows_RM[rows])
        else:
            gathered = _gather(x_TM, token_R[rows], rows_RM[rows])
            torch.mul(gathered, weight_R1[rows], out=rows_RM[rows])
        _zero_unused(rows_RM[rows], src_pair_R[rows])

    _for_each_block(rows_RM, fill)
    return rows_RM


@small_on_one_thread
def _bags(
    dest_row_TK: Tensor, topk_weight_TK: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(rows, offsets, weights) of an embedding bag per token, without dropped pairs."""
    valid_TK = dest_row_TK >= 0
    if bool(valid_TK.all()):
        return dest_row_TK, None, topk_weight_TK
    count_T = valid_TK.sum(dim=1, dtype=dest_row_TK.dtype)
    offset_T = count_T.cumsum(0, dtype=dest_row_TK.dtype) - count_T
    return (
        dest_row_TK[valid_TK],
        offset_T,
        None if topk_weight_TK is None else topk_weight_TK[valid_TK],
    )


def _bag_sum(rows_RM: Tensor, dest_row_TK: Tensor, topk_weight_TK: Tensor | None) -> Tensor:
    """Weighted gather-sum in one pass by torch's embedding bag; dropped pairs are left out."""
    row, offset_T, weight = _bags(dest_row_TK, topk_weight_TK)
    return F.embedding_bag(row, rows_RM, offset_T, mode="sum", per_sample_weights=weight)


def _loop_sum(rows_RM: Tensor, dest_row_TK: Tensor, topk_weight_TK: Tensor | None) -> Tensor:
    acc = _acc_dtype(rows_RM.dtype)
    y_TM = rows_RM.new_zeros((dest_row_TK.shape[0], rows_RM.shape[1]), dtype=acc)
    for k in range(dest_row_TK.shape[1]):
        row_T = dest_row_TK[:, k]
        part_TM = rows_RM.index_select(0, row_T.clamp(min=0)).to(acc)
        if topk_weight_TK is not None:
            part_TM = part_TM * topk_weight_TK[:, k, None].to(acc)
        # where, not a product with 0: a dropped pair must not carry a NaN over from row 0
        y_TM += part_TM.where((row_T >= 0)[:, None], 0)
    return y_TM.to(rows_RM.dtype)


def combine_fwd(rows_RM: Tensor, dest_row_TK: Tensor, topk_weight_TK: Tensor | None) -> Tensor:
    """y_TM[t] = sum over k with dest_row >= 0 of (weight or 1) * rows[dest_row[t, k]]; (T, M).

    Sums in fp32 (fp64 for fp64 rows) and returns the dtype of the rows.
    """
    if rows_RM.shape[0] == 0 or dest_row_TK.numel() == 0:
        return rows_RM.new_zeros((dest_row_TK.shape[0], rows_RM.shape[1]))
    same_dtype = topk_weight_TK is None or topk_weight_TK.dtype == rows_RM.dtype
    if rows_RM.device.type == "cpu" and rows_RM.dtype == torch.float32 and same_dtype:
        return _bag_sum(rows_RM, dest_row_TK, topk_weight_TK)
    return _loop_sum(rows_RM, dest_row_TK, topk_weight_TK)


def _gather_dot(
    a_TM: Tensor, b_RM: Tensor, src_pair_R: Tensor, top_k: int, topk_weight_TK: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Gathers a once: weight * a[token] as (R, M), None without weight, and <a[token], b>.

    Unused rows are zero in the first and hold anything in the second.
    """
    acc = _acc_dtype(b_RM.dtype)
    token_R = src_pair_R.clamp(min=0) // top_k
    weight_R1 = (
        None if topk_weight_TK is None else _row_weight(topk_weight_TK, src_pair_R, b_RM.dtype)
    )
    scaled_RM = None if topk_weight_TK is None else b_RM.new_empty(b_RM.shape)
    dot_R = b_RM.new_empty(b_RM.shape[0], dtype=acc)

    def fill(rows):
        b = b_RM[rows].to(acc)
        out = torch.empty_like(b) if scaled_RM is None else scaled_RM[rows]
        gathered = _gather(a_TM, token_R[rows], out)
        torch.sum(gathered * b, 1, out=dot_R[rows])
        if scaled_RM is not None:
            torch.mul(gathered, weight_R1[rows], out=scaled_RM[rows])
            _zero_unused(scaled_RM[rows], src_pair_R[rows])

    _for_each_block(b_RM, fill)
    return scaled_RM, dot_R


def combine_bwd(
    dy_TM: Tensor,
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    topk_weight_TK: Tensor,
    *,
    needs_rows: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`combine_fwd`: d_rows (R, M) and d_weight (T, K) in weight's dtype.

    d_rows[dest_row[t, k]] = weight[t, k] * dy[t]; d_weight[t, k] = <dy[t], rows[dest_row[t, k]]>.
    A gradient that is not needed comes back with shape (0,).
    """
    if not needs_weight:
        d_rows_RM = rows_RM.new_empty(0)
        if needs_rows:
            d_rows_RM = _fill_rows(dy_TM, dest_row_TK, src_pair_R, topk_weight_TK)
        return d_rows_RM, topk_weight_TK.new_empty(0)
    if dest_row_TK.numel() == 0:
        d_rows_RM = rows_RM.new_zeros(rows_RM.shape if needs_rows else 0)
        return d_rows_RM, topk_weight_TK.new_zeros(topk_weight_TK.shape)
    d_rows_RM, dot_R = _gather_dot(
        dy_TM, rows_RM, src_pair_R, dest_row_TK.shape[1], topk_weight_TK if needs_rows else None
    )
    if d_rows_RM is None:
        d_rows_RM = rows_RM.new_empty(0)
    return d_rows_RM, _pair_values(dot_R, topk_weight_TK, src_pair_R)


def dispatch_bwd(d_rows_RM: Tensor, dest_row_TK: Tensor) -> Tensor:
    """Gradient of the tokens of :func:`dispatch_fwd`, (T, M): the sum of each token's rows."""
    return combine_fwd(d_rows_RM, dest_row_TK, None)
