"""Operator of dispatch and the experts' network in one: the dispatched rows are never written."""

from typing import Optional

import torch
from torch import Tensor

from ..backends import GATES
from ._operator import check_indices, empty_gradients, operator
from .backend import backend_for, implementation
from .expert_ffn import FFNOptions, check_ffn

# Largest width of fc1's output. Products of wide experts take so long that the pass over the rows
# hardly counts, and torch's own product, which cannot gather, is the faster one.
_WIDEST = 2048


def gathers_tokens(x_TM: Tensor, fc1_weight: Tensor) -> bool:
    """Return whether :func:`token_ffn` takes less time than dispatch and ``expert_ffn``.

    Triton's products gather rows; the torch backend would write them.
    """
    narrow = fc1_weight.shape[1] <= _WIDEST
    return narrow and backend_for(x_TM.device) == "triton" and x_TM.dtype != torch.float64


def _fake(x, dest_row, src_pair, w1, b1, w2, b2, offsets, seed, activation, p1, p2, keep_hidden):
    num_rows = src_pair.shape[0]
    kept = num_rows if keep_hidden else 0
    out = x.new_empty((num_rows, x.shape[1]))
    return out, x.new_empty((kept, w1.shape[1])), x.new_empty((kept, w2.shape[2]))


@operator("token_ffn", _fake)
def _token_ffn(
    x: Tensor,
    dest_row: Tensor,
    src_pair: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Optional[Tensor],
    fc2_weight: Tensor,
    fc2_bias: Optional[Tensor],
    offsets: Tensor,
    seed: Optional[Tensor],
    activation: str,
    activation_dropout_p: float,
    dropout_p: float,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = x, dest_row, src_pair, fc1_weight, fc1_bias, fc2_weight, fc2_bias
    options = FFNOptions(activation, (activation_dropout_p, dropout_p))
    given = options.given(offsets=offsets, seed=seed, keep_hidden=keep_hidden)
    return implementation("token_ffn_fwd", x)(*tensors, **given)


def _fake_bwd(
    d_out, x, dest_row, src_pair, hidden, active, w1, b1, w2, b2, offsets, seed, *options
):
    *_, needs_x, needs_params = options
    some = [x.new_empty(0) if param is None else param for param in (w1, b1, w2, b2)]
    return empty_gradients((x, *some), (needs_x, *(4 * [needs_params])))


@operator("token_ffn_bwd", _fake_bwd)
def _token_ffn_bwd(
    d_out: Tensor,
    x: Tensor,
    dest_row: Tensor,
    src_pair: Tensor,
    hidden: Tensor,
    active: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Optional[Tensor],
    fc2_weight: Tensor,
    fc2_bias: Optional[Tensor],
    offsets: Tensor,
    seed: Optional[Tensor],
    activation: str,
    activation_dropout_p: float,
    dropout_p: float,
    needs_x: bool,
    needs_params: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    params = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    options = FFNOptions(activation, (activation_dropout_p, dropout_p))
    given = options.given(offsets=offsets, seed=seed, needs_x=needs_x, needs_params=needs_params)
    backward = implementation("token_ffn_bwd", x)
    return backward(d_out, x, dest_row, src_pair, hidden, active, *params, **given)


def _setup(ctx, inputs, output):
    *tensors, activation, activation_dropout_p, dropout_p, _ = inputs
    _, hidden, active = output
    ctx.options = activation, activation_dropout_p, dropout_p
    ctx.mark_non_differentiable(hidden, active)
    ctx.set_materialize_grads(False)
    x, dest_row, src_pair, *rest = tensors
    ctx.save_for_backward(x, dest_row, src_pair, hidden, active, *rest)


def _backward(ctx, d_out, d_hidden, d_active):
    if d_out is None:
        return (None,) * 13
    needs_x, _, _, *needs = ctx.needs_input_grad[:7]
    grads = _token_ffn_bwd(d_out, *ctx.saved_tensors, *ctx.options, needs_x, any(needs))
    d_x, *d_params = (g if n else None for g, n in zip(grads, (needs_x, *needs), strict=True))
    return d_x, None, None, *d_params, *(None,) * 6


_token_ffn.register_autograd(_backward, setup_context=_setup)


def token_ffn(
    x_TM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    offsets: Tensor,
    options: FFNOptions,
) -> Tensor:
    """Apply each expert to its tokens: ``expert_ffn(dispatch(x, dest_row, src_pair), ...)``.

    Args:
        x_TM: (T, M) tokens; differentiable.
        dest_row_TK, src_pair_R: as of :func:`~fairseq_tutel.ops.dispatch`.
        fc1_weight, fc1_bias, fc2_weight, fc2_bias: as of
            :func:`~fairseq_tutel.ops.expert_ffn`; differentiable.
        offsets: (e,) int32 end row of each expert.
        options: activation and dropout.

    Returns:
        (R, M) in the dtype of x; unspecified after the last expert's rows.

    Raises:
        ValueError: an unknown activation, a wrong shape or dtype.
    """
    check_indices("dest_row", dest_row_TK, "tokens", "top_k")
    check_indices("src_pair", src_pair_R, "rows")
    if x_TM.dim() != 2 or x_TM.shape[0] != dest_row_TK.shape[0]:
        raise ValueError(f"x must be ({dest_row_TK.shape[0]}, model_dim), got {tuple(x_TM.shape)}")
    params = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    check_ffn(x_TM, *params, offsets, options.activation in GATES)
    seed = options.draw_seed(x_TM.device)
    keep_hidden = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (x_TM, *params)
    )
    maps, how = (dest_row_TK, src_pair_R), (options.activation, *options.dropout_p, keep_hidden)
    return _token_ffn(x_TM, *maps, *params, offsets, seed, *how)[0]
