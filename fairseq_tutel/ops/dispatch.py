"""Operators that move tokens to expert rows (dispatch) and back (combine).

Legend: T tokens, K top-k, M model dim, R rows.
"""

from typing import Optional

import torch
from torch import Tensor

from .backend import implementation


def _check_maps(row_TK: Tensor, pair_R: Tensor) -> None:
    if row_TK.dim() != 2 or row_TK.dtype != torch.int32:
        raise ValueError(
            f"row must be (tokens, top_k) int32, got {tuple(row_TK.shape)} {row_TK.dtype}"
        )
    if pair_R.dim() != 1 or pair_R.dtype != torch.int32:
        raise ValueError(f"pair must be (rows,) int32, got {tuple(pair_R.shape)} {pair_R.dtype}")


def _check_weight(weight_TK: Tensor, row_TK: Tensor) -> None:
    if weight_TK.shape != row_TK.shape:
        raise ValueError(
            f"weight {tuple(weight_TK.shape)} must have the shape of row {tuple(row_TK.shape)}"
        )


@torch.library.custom_op("fairseq_tutel::dispatch", mutates_args=())
def _dispatch(x: Tensor, row: Tensor, pair: Tensor, weight: Optional[Tensor]) -> Tensor:
    return implementation(x).dispatch_fwd(x, row, pair, weight)


@_dispatch.register_fake
def _(x, row, pair, weight):
    return x.new_empty((pair.shape[0], x.shape[1]))


@torch.library.custom_op("fairseq_tutel::dispatch_bwd", mutates_args=())
def _dispatch_bwd(
    d_rows: Tensor,
    x: Tensor,
    row: Tensor,
    pair: Tensor,
    weight: Optional[Tensor],
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    impl = implementation(d_rows)
    return impl.dispatch_bwd(
        d_rows, x, row, pair, weight, needs_x=needs_x, needs_weight=needs_weight
    )


@_dispatch_bwd.register_fake
def _(d_rows, x, row, pair, weight, needs_x, needs_weight):
    d_x = d_rows.new_empty((row.shape[0], d_rows.shape[1]) if needs_x else (0,))
    if weight is None or not needs_weight:
        return d_x, d_rows.new_empty((0,), dtype=torch.float32)
    return d_x, weight.new_empty(weight.shape)


def _dispatch_setup(ctx, inputs, output):
    x, row, pair, weight = inputs
    # x itself is only needed for the gradient of the weights
    ctx.has_weight = weight is not None
    ctx.save_for_backward(x if ctx.has_weight else x.new_empty((0,)), row, pair, weight)


def _dispatch_backward(ctx, d_rows):
    x, row, pair, weight = ctx.saved_tensors
    needs_x = ctx.needs_input_grad[0]
    needs_weight = ctx.has_weight and ctx.needs_input_grad[3]
    d_x, d_weight = _dispatch_bwd(d_rows, x, row, pair, weight, needs_x, needs_weight)
    return d_x if needs_x else None, None, None, d_weight if needs_weight else None


_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


def dispatch(
    x_TM: Tensor, row_TK: Tensor, pair_R: Tensor, weight_TK: Tensor | None = None
) -> Tensor:
    """Copy tokens to expert rows: rows[r] = (weight or 1) * x[pair[r] // K], unused rows zero.

    Args:
        x_TM: (T, M) tokens; differentiable.
        row_TK: (T, K) int32 row of each pair, -1 = dropped.
        pair_R: (R,) int32, the inverse of ``row_TK`` (:func:`invert_rows`).
        weight_TK: (T, K) weight of each pair, or None; differentiable.

    Returns:
        (R, M) in the dtype of x.

    Raises:
        ValueError: a tensor of a wrong shape or dtype.
    """
    _check_maps(row_TK, pair_R)
    if x_TM.dim() != 2 or x_TM.shape[0] != row_TK.shape[0]:
        raise ValueError(f"x must be ({row_TK.shape[0]}, model_dim), got {tuple(x_TM.shape)}")
    if weight_TK is not None:
        _check_weight(weight_TK, row_TK)
    return _dispatch(x_TM, row_TK, pair_R, weight_TK)


@torch.library.custom_op("fairseq_tutel::combine", mutates_args=())
def _combine(rows: Tensor, row: Tensor, pair: Tensor, weight: Tensor) -> Tensor:
    return implementation(rows).combine_fwd(rows, row, pair, weight)


@_combine.register_fake
def _(rows, row, pair, weight):
    return rows.new_empty((row.shape[0], rows.shape[1]))


@torch.library.custom_op("fairseq_tutel::combine_bwd", mutates_args=())
def _combine_bwd(
    dy: Tensor,
    rows: Tensor,
    row: Tensor,
    pair: Tensor,
    weight: Tensor,
    needs_rows: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    impl = implementation(dy)
    return impl.combine_bwd(
        dy, rows, row, pair, weight, needs_rows=needs_rows, needs_weight=needs_weight
    )


@_combine_bwd.register_fake
def _(dy, rows, row, pair, weight, needs_rows, needs_weight):
    d_rows = rows.new_empty(rows.shape if needs_rows else (0,))
    return d_rows, weight.new_empty(weight.shape if needs_weight else (0,))


def _combine_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx, dy):
    rows, row, pair, weight = ctx.saved_tensors
    needs_rows, _, _, needs_weight = ctx.needs_input_grad
    d_rows, d_weight = _combine_bwd(dy, rows, row, pair, weight, needs_rows, needs_weight)
    return d_rows if needs_rows else None, None, None, d_weight if needs_weight else None


_combine.register_autograd(_combine_backward, setup_context=_combine_setup)


def combine(rows_RM: Tensor, row_TK: Tensor, pair_R: Tensor, weight_TK: Tensor) -> Tensor:
    """Weighted sum of each token's rows: y[t] = sum over row >= 0 of weight * rows[row[t, k]].

    Args:
        rows_RM: (R, M); differentiable.
        row_TK: (T, K) int32 row of each pair, -1 = dropped.
        pair_R: (R,) int32, the inverse of ``row_TK`` (:func:`invert_rows`).
        weight_TK: (T, K) fp32; differentiable.

    Returns:
        (T, M) in the dtype of the rows, summed in fp32.

    Raises:
        ValueError: a tensor of a wrong shape or dtype.
    """
    _check_maps(row_TK, pair_R)
    _check_weight(weight_TK, row_TK)
    if rows_RM.dim() != 2 or rows_RM.shape[0] != pair_R.shape[0]:
        raise ValueError(f"rows must be ({pair_R.shape[0]}, model_dim), got {tuple(rows_RM.shape)}")
    return _combine(rows_RM, row_TK, pair_R, weight_TK)
