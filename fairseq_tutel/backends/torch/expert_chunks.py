"""The experts' network on rows that come in chunks, in plain torch.

The backward pass of ``expert_ffn.py`` in two: what has to be known before the gradient of the rows
can be sent, and weight gradients, for which the gradient of the hidden values is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._expert_blocks import Blocks, of_experts
from ._memory import empty
from .activation import acc_dtype


def expert_chunk_bwd(
    d_out: Tensor,
    saved: Tensor,
    *params: Tensor | None,
    needs_rows: bool = True,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``expert_ffn_fwd``, which returned ``saved``, but those of weights: of the
    rows, shape (0,) unless they are needed; of the output before its dropout; of the values before
    the activation, (R, F); of fc1's bias and of fc2's, (e, F) and (e, M), (0,) of None.
    """
    _, model_dim, hidden_dim = params[2].shape
    to = Blocks.of(d_out, hidden_dim, **options)
    given_RM = d_out.reshape(-1, model_dim)
    d_out_RM = torch.empty_like(given_RM) if to.dropout_p[1] > 0 else given_RM
    d_rows_RM = empty(d_out, given_RM.shape if needs_rows else (0,))
    d_hidden_RF = empty(saved, saved.shape)
    d_b1, d_b2 = to.bias_sums(params)
    for block, dy, d_h, *_ in to.backward(given_RM, saved, params, d_rows_RM, d_b1, d_b2):
        if d_out_RM is not given_RM:
            block.of(d_out_RM).copy_(dy)
        block.of(d_hidden_RF).copy_(d_h)
    d_rows = d_rows_RM.view(d_out.shape if needs_rows else 0)
    return d_rows, d_out_RM.view(d_out.shape), d_hidden_RF, d_b1, d_b2


def expert_chunks_bwd_params(
    chunks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
    offsets: Sequence[Tensor | None],
    seeds: Sequence[Tensor | None],
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    **options,
) -> tuple[Tensor, Tensor]:
    """Gradients of fc1's weight and of fc2's, summed over the rows of all chunks.

    ``chunks``: of each its gradients of the output before its dropout and of the values before the
    activation, its rows, and second and third value of its forward pass.
    """
    # in fp32, or sums in half precision would be rounded once per chunk
    acc = acc_dtype(fc1_weight.dtype)
    d_w1, d_w2 = (empty(w, w.shape, acc) for w in (fc1_weight, fc2_weight))
    for number, (chunk, ends, seed) in enumerate(zip(chunks, offsets, seeds, strict=True)):
        to = Blocks.of(chunk[2], fc2_weight.shape[2], offsets=ends, seed=seed, **options)
        d_out, d_hidden, rows, saved, _ = (x.reshape(-1, x.shape[-1]) for x in chunk)
        for block in to.blocks:
            block = block._replace(first=block.first and number == 0)
            (b1,) = of_experts([fc1_bias], block)
            dy, z = block.of(d_out), to.pre_activation(block.of(saved), b1)
            keep_a, _ = to.masks(block, dy)
            block.add_product(d_w2, dy, to.activate(z, keep_a).to(to.dtype))
            block.add_product(d_w1, block.of(d_hidden), block.of(rows))
    return d_w1.to(fc1_weight.dtype), d_w2.to(fc2_weight.dtype)
