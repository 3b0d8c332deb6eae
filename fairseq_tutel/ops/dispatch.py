"""Operators that move tokens to expert rows (dispatch) and back (combine).

``dest_row_TK``, int32, is the row of each (token, choice) pair, -1 = dropped; ``src_pair_R``,
int32, is its inverse, the pair t * K + k in each row, -1 = unused.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ._operator import check_indices, check_shape, empty_gradients, operator, save_inputs
from .backend import backend_for, implementation


def check_maps(dest_row_TK: Tensor, src_pair_R: Tensor) -> None:
    """Raise ValueError for maps of a wrong shape or dtype."""
    check_indices("dest_row", dest_row_TK, "tokens", "top_k")
    check_indices("src_pair", src_pair_R, "rows")


def check_tokens(shape: Sequence[int], dest_row_TK: Tensor) -> None:
    """Raise ValueError unless there is a token for each line of the map."""
    if len(shape) != 2 or shape[0] != dest_row_TK.shape[0]:
        raise ValueError(f"x must be ({dest_row_TK.shape[0]}, model_dim), got {tuple(shape)}")


@operator("dispatch", lambda x, dest_row, src_pair: x.new_empty((src_pair.shape[0], x.shape[1])))
def _dispatch(x: Tensor, dest_row: Tensor, src_pair: Tensor) -> Tensor:
    return implementation("dispatch_fwd", x)(x, dest_row, src_pair)


@operator(
    "dispatch_bwd", lambda d_rows, dest_row: d_rows.new_empty((dest_row.shape[0], d_rows.shape[1]))
)
def _dispatch_bwd(d_rows: Tensor, dest_row: Tensor) -> Tensor:
    return implementation("dispatch_bwd", d_rows)(d_rows, dest_row)


def _dispatch_backward(ctx, d_rows):
    return _dispatch_bwd(d_rows, *ctx.saved_tensors), None, None


_dispatch.register_autograd(
    _dispatch_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
)


def dispatch(x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """Copy tokens to expert rows: rows[r] = x[src_pair[r] // K], unused rows zero.

    The tokens (T, M) are differentiable. Return (R, M) in their dtype.
    """
    check_maps(dest_row_TK, src_pair_R)
    check_tokens(x_TM.shape, dest_row_TK)
    return _dispatch(x_TM, dest_row_TK, src_pair_R)


def _fake_combine(rows, dest_row, src_pair, weight, bias, expert):
    return rows.new_empty((dest_row.shape[0], rows.shape[1]))


@operator("combine", _fake_combine)
def _combine(
    rows: Tensor,
    dest_row: Tensor,
    src_pair: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    expert: Optional[Tensor],
) -> Tensor:
    return implementation("combine_fwd", rows)(rows, dest_row, weight, bias, expert)


def _fake_combine_bwd(dy, rows, dest_row, src_pair, weight, bias, expert, *needs):
    return empty_gradients((rows, weight, rows if bias is None else bias), needs)


@operator("combine_bwd", _fake_combine_bwd)
def _combine_bwd(
    dy: Tensor,
    rows: Tensor,
    dest_row: Tensor,
    src_pair: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    expert: Optional[Tensor],
    needs_rows: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    needs = {"needs_rows": needs_rows, "needs_weight": needs_weight, "needs_bias": needs_bias}
    gradients = implementation("combine_bwd", dy)
    return gradients(dy, rows, dest_row, src_pair, weight, bias, expert, **needs)


def _combine_backward(ctx, dy):
    needs_rows, _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
    needs = needs_rows, needs_weight, needs_bias
    found = _combine_bwd(dy, *ctx.saved_tensors, *needs)
    d_rows, d_weight, d_bias = (g if n else None for g, n in zip(found, needs, strict=True))
    return d_rows, None, None, d_weight, d_bias, None


_combine.register_autograd(_combine_backward, setup_context=save_inputs)


def dispatch_bwd(d_rows_RM: Tensor, dest_row_TK: Tensor) -> Tensor:
    """Return the sum of each token's rows, (T, M), the gradient of dispatch, without autograd."""
    return implementation("dispatch_bwd", d_rows_RM)(d_rows_RM, dest_row_TK)


def combine_bwd(
    dy_TM: Tensor, rows_RM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor, topk_weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`combine`'s rows and weights, without autograd."""
    maps = dest_row_TK, src_pair_R, topk_weight_TK, None, None
    d_rows_RM, d_weight_TK, _ = _combine_bwd(dy_TM, rows_RM, *maps, True, True, False)
    return d_rows_RM, d_weight_TK


def combine_takes_bias(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the experts' last bias costs less in :func:`combine` than on its own.

    A Triton kernel adds it to rows that it has read anyway. The torch backend's products add it.
    """
    return backend_for(device) == "triton" and dtype != torch.float64


def combine(
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    topk_weight_TK: Tensor,
    bias_EM: Tensor | None = None,
    expert_TK: Tensor | None = None,
) -> Tensor:
    """Sum each token's weighted rows: y[t] = sum over dest_row >= 0 of weight * rows[dest_row].

    Args:
        rows_RM: (R, M); differentiable.
        topk_weight_TK: (T, K) fp32; differentiable.
        bias_EM: (E, M), added to each row by its expert before the sum; differentiable (default
            None: no bias).
        expert_TK: (T, K) int32 expert of each pair; needed with a bias.

    Returns:
        (T, M) in the dtype of the rows, summed in fp32.
    """
    check_maps(dest_row_TK, src_pair_R)
    check_shape("topk_weight", topk_weight_TK, dest_row_TK.shape)
    if rows_RM.dim() != 2 or rows_RM.shape[0] != src_pair_R.shape[0]:
        raise ValueError(
            f"rows must be ({src_pair_R.shape[0]}, model_dim), got {tuple(rows_RM.shape)}"
        )
    if (bias_EM is None) != (expert_TK is None):
        raise ValueError("a bias needs the expert of each pair, and experts need a bias: give both")
    if bias_EM is not None and expert_TK is not None:
        check_indices("expert", expert_TK, "tokens", "top_k")
        check_shape("expert", expert_TK, dest_row_TK.shape)
        if bias_EM.dim() != 2 or bias_EM.shape[1] != rows_RM.shape[1]:
            raise ValueError(
                f"bias must be (experts, {rows_RM.shape[1]}), got {tuple(bias_EM.shape)}"
            )
    return _combine(rows_RM, dest_row_TK, src_pair_R, topk_weight_TK, bias_EM, expert_TK)
