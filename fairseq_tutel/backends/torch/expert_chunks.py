"""The experts' network on rows that come in chunks, in plain torch.

The backward pass of ``expert_ffn.py`` in two: what has to be known before the gradient of the rows
can be sent, and weight gradients, for which the gradient of the hidden values is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._expert_blocks import Blocks, blocks_of
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
    for block, dy, d_h in to.backward(given_RM, saved, params, d_rows_RM, d_b1, d_b2):
        if d_out_RM is not given_RM:
            d_out_RM[block.rows] = dy
        d_hidden_RF[block.rows] = d_h
    d_rows = d_rows_RM.view(d_out.shape if needs_rows else 0)
    return d_rows, d_out_RM.view(d_out.shape), d_hidden_RF, d_b1, d_b2


def expert_chunks_bwd_params(
    chunks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], offsets: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Gradients of fc1's weight and of fc2's, summed over the rows of all chunks.

    ``chunks``: of each its gradients of the output before its dropout and of the values before the
    activation, its rows, and the third value of its forward pass.
    """
    d_out, d_hidden, rows, active = chunks[0]
    hidden_dim = active.shape[-1]
    experts = len(rows) if offsets[0] is None else len(offsets[0])
    # in fp32, or sums in half precision would be rounded once per chunk
    acc = acc_dtype(rows.dtype)
    shapes = ((d_hidden.shape[-1], rows.shape[-1]), (d_out.shape[-1], hidden_dim))
    d_w1, d_w2 = (empty(rows, (experts, *shape), acc) for shape in shapes)
    for number, (chunk, ends) in enumerate(zip(chunks, offsets, strict=True)):
        d_out, d_hidden, rows, active = (x.reshape(-1, x.shape[-1]) for x in chunk)
        for block in blocks_of(chunk[2], hidden_dim, ends):
            d_out_N, active_N, d_hidden_N, rows_N = (
                each[block.rows] for each in (d_out, active, d_hidden, rows)
            )
            block.add_products(d_w2, d_out_N, active_N, begin=number == 0)
            block.add_products(d_w1, d_hidden_N, rows_N, begin=number == 0)
    return d_w1.to(rows.dtype), d_w2.to(rows.dtype)
