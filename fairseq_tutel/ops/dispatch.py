"""Operators that move tokens to expert rows (dispatch) and back (combine).

``dest_row_TK`` is the row of each (token, choice) pair, -1 = dropped; ``src_pair_R`` is its
inverse, the pair t * K + k in each row, -1 = unused.
"""

from torch import Tensor

from ._operator import check_indices, check_shape, empty_gradients, operator, save_inputs
from .backend import implementation


def _check_maps(dest_row_TK: Tensor, src_pair_R: Tensor) -> None:
    check_indices("dest_row", dest_row_TK, "tokens", "top_k")
    check_indices("src_pair", src_pair_R, "rows")


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
    _dispatch_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def dispatch(x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """Copy tokens to expert rows: rows[r] = x[src_pair[r] // K], unused rows zero.

    Args:
        x_TM: (T, M) tokens; differentiable.
        dest_row_TK: (T, K) int32 row of each pair, -1 = dropped.
        src_pair_R: (R,) int32, the inverse of ``dest_row_TK``.

    Returns:
        (R, M) in the dtype of x.

    Raises:
        ValueError: a tensor of a wrong shape or dtype.
    """
    _check_maps(dest_row_TK, src_pair_R)
    if x_TM.dim() != 2 or x_TM.shape[0] != dest_row_TK.shape[0]:
        raise ValueError(f"x must be ({dest_row_TK.shape[0]}, model_dim), got {tuple(x_TM.shape)}")
    return _dispatch(x_TM, dest_row_TK, src_pair_R)


@operator(
    "combine",
    lambda rows, dest_row, src_pair, weight: rows.new_empty((dest_row.shape[0], rows.shape[1])),
)
def _combine(rows: Tensor, dest_row: Tensor, src_pair: Tensor, weight: Tensor) -> Tensor:
    return implementation("combine_fwd", rows)(rows, dest_row, weight)


@operator(
    "combine_bwd",
    lambda dy, rows, dest_row, src_pair, weight, *needs: empty_gradients((rows, weight), needs),
)
def _combine_bwd(
    dy: Tensor,
    rows: Tensor,
    dest_row: Tensor,
    src_pair: Tensor,
    weight: Tensor,
    needs_rows: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    return implementation("combine_bwd", dy)(
        dy, rows, dest_row, src_pair, weight, needs_rows=needs_rows, needs_weight=needs_weight
    )


def _combine_backward(ctx, dy):
    needs_rows, _, _, needs_weight = ctx.needs_input_grad
    d_rows, d_weight = _combine_bwd(dy, *ctx.saved_tensors, needs_rows, needs_weight)
    return d_rows if needs_rows else None, None, None, d_weight if needs_weight else None


_combine.register_autograd(_combine_backward, setup_context=save_inputs)


def combine(
    rows_RM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor, topk_weight_TK: Tensor
) -> Tensor:
    """Sum each token's weighted rows: y[t] = sum over dest_row >= 0 of weight * rows[dest_row].

    Args:
        rows_RM: (R, M); differentiable.
        dest_row_TK: (T, K) int32 row of each pair, -1 = dropped.
        src_pair_R: (R,) int32, the inverse of ``dest_row_TK``.
        topk_weight_TK: (T, K) fp32; differentiable.

    Returns:
        (T, M) in the dtype of the rows, summed in fp32.

    Raises:
        ValueError: a tensor of a wrong shape or dtype.
    """
    _check_maps(dest_row_TK, src_pair_R)
    check_shape("topk_weight", topk_weight_TK, dest_row_TK.shape)
    if rows_RM.dim() != 2 or rows_RM.shape[0] != src_pair_R.shape[0]:
        raise ValueError(
            f"rows must be ({src_pair_R.shape[0]}, model_dim), got {tuple(rows_RM.shape)}"
        )
    return _combine(rows_RM, dest_row_TK, src_pair_R, topk_weight_TK)
