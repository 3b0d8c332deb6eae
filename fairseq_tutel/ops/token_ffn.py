"""Operator of dispatch and the experts' network in one: the dispatched rows are never written."""

import torch
from torch import Tensor

from ..backends import GATES
from ._operator import empty_gradients, operator
from .backend import backend_for, implementation
from .dispatch import check_maps, check_tokens
from .expert_ffn import (
    NETWORK,
    FFNOptions,
    check_ffn,
    fake_params_bwd,
    needs_gradient,
    split_network,
)

# Largest width of fc1's output. Products of wide experts take so long that the pass over the rows
# hardly counts, and torch's own product, which cannot gather, is the faster one.
_WIDEST = 2048


def gathers_tokens(x_TM: Tensor, fc1_weight: Tensor) -> bool:
    """Return whether :func:`token_ffn` takes less time than dispatch and ``expert_ffn``.

    Triton's products gather rows; the torch backend would write them.
    """
    narrow = fc1_weight.shape[1] <= _WIDEST
    return narrow and backend_for(x_TM.device) == "triton" and x_TM.dtype != torch.float64


def _fake(x, dest_row, src_pair, w1, b1, w2, *arguments):
    num_rows = src_pair.shape[0]
    kept = num_rows if arguments[-1] else 0
    out = x.new_empty((num_rows, x.shape[1]))
    return out, x.new_empty((kept, w1.shape[1])), x.new_empty((kept, w2.shape[2]))


_MAPS = "Tensor dest_row, Tensor src_pair"


@operator(
    "token_ffn",
    _fake,
    f"(Tensor x, {_MAPS}, {NETWORK}, bool keep_hidden) -> (Tensor, Tensor, Tensor)",
)
def _token_ffn(x, dest_row, src_pair, *arguments):
    *network, keep_hidden = arguments
    params, given = split_network(*network)
    forward = implementation("token_ffn_fwd", x)
    return forward(x, dest_row, src_pair, *params, keep_hidden=keep_hidden, **given)


def _fake_bwd(d_out, x, dest_row, src_pair, hidden, active, *arguments):
    *network, needs_x, needs_params = arguments
    return *empty_gradients([x], [needs_x]), *fake_params_bwd(network[:4], needs_params)


@operator(
    "token_ffn_bwd",
    _fake_bwd,
    f"(Tensor d_out, Tensor x, {_MAPS}, Tensor hidden, Tensor active, {NETWORK}, bool needs_x, "
    "bool needs_params) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _token_ffn_bwd(d_out, x, dest_row, src_pair, hidden, active, *arguments):
    *network, needs_x, needs_params = arguments
    params, given = split_network(*network)
    given |= {"needs_x": needs_x, "needs_params": needs_params}
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
    *params: Tensor | None,
    offsets: Tensor,
    options: FFNOptions,
) -> Tensor:
    """Apply each expert to its tokens: ``expert_ffn(dispatch(x, dest_row, src_pair), ...)``.

    Args:
        x_TM: (T, M) tokens; differentiable.
        dest_row_TK, src_pair_R: as of :func:`~fairseq_tutel.ops.dispatch`.
        params: fc1's weight and bias and fc2's, as of :func:`~fairseq_tutel.ops.expert_ffn`;
            differentiable.
        offsets: (e,) int32 end row of each expert.
        options: activation and dropout.

    Returns:
        (R, M) in the dtype of x; unspecified after the last expert's rows.
    """
    check_maps(dest_row_TK, src_pair_R)
    check_tokens(x_TM, dest_row_TK)
    check_ffn(x_TM, params, offsets, options.activation in GATES)
    seed = options.draw_seed(x_TM.device)
    how = options.activation, *options.dropout_p, needs_gradient(x_TM, *params)
    return _token_ffn(x_TM, dest_row_TK, src_pair_R, *params, offsets, seed, *how)[0]
