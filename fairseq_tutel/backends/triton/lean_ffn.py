"""Gradients of the experts' network and of combine, from fewer kept values, on a GPU.

One kernel computes the activation again with its gradient, weighs both, and sums the gradients of
the weights. The functions are those of :mod:`fairseq_tutel.backends.torch.lean_ffn`.
"""

import torch
from torch import Tensor

from .._weights import row_weights
from ._autotune import act_configs
from ._grouped_tma import Source
from ._runtime import checked
from ._sizes import cdiv, next_power_of_2
from .activation import bias_act_bwd
from .dispatch import dispatch_bwd, dispatch_fwd
from .expert_ffn import elementwise, linear, product, weight_gradients


def lean_ffn_bwd(
    dy_TM: Tensor,
    x_TM: Tensor,
    topk_weight_TK: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    hidden: Tensor,
    *params: Tensor | None,
    needs_x: bool = True,
    needs_params: bool = True,
    offsets: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.lean_ffn_bwd` in Triton; fp32, fp16 or bf16.

    Products of ragged rows gather them from the tokens.
    """
    maps, experts = (dest_row_TK, src_pair_R), len(params[2])
    weight_R = row_weights(topk_weight_TK, src_pair_R, torch.float32)
    dy = dispatch_fwd(dy_TM, *maps)
    if offsets is None:
        source, rows = None, dispatch_fwd(x_TM, *maps).view(experts, -1, x_TM.shape[1])
        dy = dy.view(rows.shape)
    else:
        source, rows = Source(src_pair_R, dest_row_TK.shape[1]), x_TM
    given = {"needs_rows": needs_x, "offsets": offsets, "source": source, **options}
    d_rows, d_weight_R, d_out, d_hidden, active, d_b1, d_b2 = lean_chunk_bwd(
        dy, rows, hidden, weight_R, *params, **given
    )
    zero = d_weight_R.new_zeros(1)  # of dropped pairs
    d_weight_TK = torch.cat([d_weight_R, zero])[dest_row_TK.long()].to(topk_weight_TK.dtype)
    d_x_TM = d_rows
    if needs_x:
        d_x_TM = dispatch_bwd(d_rows.view(-1, x_TM.shape[1]), dest_row_TK)
    if not needs_params:
        return d_x_TM, d_weight_TK, *(x_TM.new_empty(0) for _ in range(4))
    d_w1, d_w2 = weight_gradients(d_out, d_hidden, rows, active, offsets, source)
    return d_x_TM, d_weight_TK, d_w1, d_b1, d_w2, d_b2


def lean_chunk_bwd(
    dy: Tensor,
    rows: Tensor,
    hidden_RF: Tensor,
    weight_R: Tensor,
    *params: Tensor | None,
    needs_rows: bool = True,
    fp8: bool = False,
    source: Source | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.lean_chunk_bwd` in Triton.

    The gradient of fc2's output is not weighted, and its input is. With a ``source`` the rows are
    tokens.
    """
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = params
    middle, last = elementwise(**options)
    offsets = middle["offsets"]
    if len(hidden_RF):
        hidden = hidden_RF.view(*dy.shape[:-1], fc1_weight.shape[1])
    else:
        hidden = linear(rows, fc1_weight, offsets, source, fp8)
    if last["dropout_p"] > 0:
        dy, _ = bias_act_bwd(dy, None, None, **last)
    d_active = product(dy, fc2_weight, offsets)
    d_hidden, d_b1, active, d_weight_R = weighted_act_bwd(
        d_active, hidden, fc1_bias, weight_R, **middle
    )
    d_b2 = dy.new_empty(0)
    if fc2_bias is not None:
        dot = product(dy, fc2_bias[:, :, None].contiguous(), offsets)
        d_weight_R = d_weight_R + dot.reshape(-1)
        weighted = (dy * weight_R.view(*dy.shape[:-1], 1)).to(dy.dtype)
        plain = {**last, "dropout_p": 0.0, "seed": None}
        _, d_b2 = bias_act_bwd(weighted, None, fc2_bias, needs_h=False, **plain)
    d_rows = product(d_hidden, fc1_weight, offsets) if needs_rows else dy.new_empty(0)
    return d_rows, d_weight_R, dy, d_hidden, active.view(-1, active.shape[-1]), d_b1, d_b2


def weighted_act_bwd(
    dy: Tensor, h: Tensor, bias: Tensor | None, weight_R: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``weight * bias_act_fwd(h)``, and the activation, in one pass.

    They are d_h; d_bias; ``weight * bias_act_fwd(h)``, like dy; ``<dy, bias_act_fwd(h)>``, (R,).
    ``weight_R`` is fp32; other arguments are those of :func:`.activation.bias_act_bwd`.
    """
    active = torch.empty_like(dy, memory_format=torch.contiguous_format)
    num_rows, narrowest = weight_R.numel(), min(c.kwargs["BLOCK_F"] for c in act_configs())
    blocks = next_power_of_2(cdiv(dy.shape[-1], narrowest))
    weight_R = checked("weight", weight_R, (num_rows,), (torch.float32,), dy.device)
    dot = dy.new_empty((num_rows, blocks), dtype=torch.float32)
    found = bias_act_bwd(dy, h, bias, weighted=(active, dot, weight_R), **options)
    return *found, active, dot.sum(1)
