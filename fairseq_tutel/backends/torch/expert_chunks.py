"""The experts' network on rows that come in chunks, in plain torch.

The backward pass of ``expert_ffn.py`` in two: what has to be known before the gradient of the rows
can be sent, and weight gradients, for which the gradient of the hidden values is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._expert_blocks import Blocks
from ._memory import empty


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
    """Return the gradients of fc1's and fc2's weights, (e, p F, M) and (e, M, F), over all chunks.

    The rows of an expert are copied together for one product: torch has no product of halves that
    keeps its fp32 sums, and a sum of rounded products would be rounded once per chunk.

    Args:
        chunks: of each chunk (d_out, d_hidden, rows, active): gradients of the output before its
            dropout and of the values before the activation, the rows, and the third value of the
            forward pass.
        offsets: of each chunk (e,) int32 end row of each expert; None for rows (e, N, M).
    """
    d_out, d_hidden, rows, active = chunks[0]
    ends = [_ends(chunk[2], each) for chunk, each in zip(chunks, offsets, strict=True)]
    experts = len(ends[0])
    d_w1 = empty(rows, (experts, d_hidden.shape[-1], rows.shape[-1]))
    d_w2 = empty(rows, (experts, d_out.shape[-1], active.shape[-1]))
    flat = [[x.reshape(-1, x.shape[-1]) for x in chunk] for chunk in chunks]
    for expert in range(experts):
        parts = [slice(each[expert - 1] if expert else 0, each[expert]) for each in ends]
        d_out, d_hidden, rows, active = (
            _joined([x[part] for x, part in zip(of_chunks, parts, strict=True)])
            for of_chunks in zip(*flat, strict=True)
        )
        torch.mm(d_out.mT, active, out=d_w2[expert])
        torch.mm(d_hidden.mT, rows, out=d_w1[expert])
    return d_w1, d_w2


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ends(rows: Tensor, offsets: Tensor | None) -> list[int]:
    """Return the end row of each expert."""
    if offsets is not None:
        return offsets.tolist()
    experts, capacity, _ = rows.shape
    return [capacity * (expert + 1) for expert in range(experts)]
