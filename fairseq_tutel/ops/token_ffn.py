"""Operator of dispatch and the experts' network in one: the dispatched rows are never written."""

import torch
from torch import Tensor

from ..backends import GATES
from .backend import backend_for
from .dispatch import check_maps, check_tokens
from .expert_ffn import (
    FFNOptions,
    check_ffn,
    needs_gradient,
    network_bwd_operator,
    network_operator,
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


_LEADING = "x", "dest_row", "src_pair"
_token_ffn_bwd = network_bwd_operator("token_ffn_bwd", *_LEADING)


def _fake_out(x, dest_row, src_pair):
    return x.new_empty((src_pair.shape[0], x.shape[1]))


_token_ffn = network_operator("token_ffn", _token_ffn_bwd, _fake_out, *_LEADING)
_token_ffn_fp8 = network_operator("token_ffn_fp8", _token_ffn_bwd, _fake_out, *_LEADING)


def token_ffn(
    x_TM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    *params: Tensor | None,
    offsets: Tensor,
    options: FFNOptions,
) -> Tensor:
    """Apply each expert to its tokens: ``expert_ffn(dispatch(x, dest_row, src_pair), ...)``.

    Tokens and ``params``, fc1's weight and bias and fc2's, are differentiable. ``offsets`` (e,)
    int32 are the end rows of experts. Return (R, M), unspecified after the last expert's rows.
    """
    check_maps(dest_row_TK, src_pair_R)
    check_tokens(x_TM, dest_row_TK)
    check_ffn(x_TM, params, offsets, options.activation in GATES)
    seed = options.draw_seed(x_TM.device)
    how = options.activation, *options.dropout_p, needs_gradient(x_TM, *params)
    function = _token_ffn_fp8 if options.fp8 else _token_ffn
    return function(x_TM, dest_row_TK, src_pair_R, *params, offsets, seed, *how)[0]
