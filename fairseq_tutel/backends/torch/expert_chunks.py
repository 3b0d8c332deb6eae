"""The experts' network on rows that come in chunks, in plain torch.

The backward pass of ``expert_ffn.py`` in two steps: first what has to be known before the gradient
of the rows can be sent, then weight gradients over all chunks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._expert_rows import Network, groups_of, sum_rows
from ._memory import empty


def expert_chunk_bwd(
    d_out: Tensor,
    saved_RF: Tensor,
    *params: Tensor | None,
    needs_rows: bool = True,
    offsets: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``expert_ffn_fwd``, but those of weights.

    They are d_rows like ``d_out``, (0,) unless needed; those of fc2's output before dropout, like
    ``d_out``, and of fc1's, (R, p F); those of the biases in fp32 (fp64), (0,) if there is none.
    """
    d_out_RM, hidden_dim = d_out.reshape(-1, d_out.shape[-1]), params[2].shape[-1]
    network = Network(d_out, hidden_dim, **options)
    d_rows = empty(d_out, d_out.shape if needs_rows else (0,))
    d_rows_RM = d_rows.view(d_out_RM.shape) if needs_rows else None
    d_fc2_RM = d_out_RM if network.dropout_p[1] == 0 else torch.empty_like(d_out_RM)
    d_fc1_RF = empty(saved_RF, saved_RF.shape)
    d_b1, d_b2 = network.bias_gradients(params)
    saved_pRF = network.planes(saved_RF)
    for group in groups_of(d_out, hidden_dim, offsets):
        d_fc2, d_fc1 = network.backward(group, params, d_out_RM, saved_pRF, d_rows_RM)
        if d_fc2_RM is not d_out_RM:
            group.split(d_fc2_RM).copy_(d_fc2)
        group.split(d_fc1_RF).copy_(d_fc1)
        sum_rows(d_fc1, d_b1[group.experts])
        sum_rows(d_fc2, d_b2[group.experts])
    return d_rows, d_fc2_RM.view(d_out.shape), d_fc1_RF, d_b1, d_b2


def expert_chunks_bwd_params(
    chunks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], offsets: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of fc1's and fc2's weights, (e, p F, M) and (e, M, F), over all chunks.

    A chunk is (d_fc2, d_fc1, rows, active): two results of :func:`expert_chunk_bwd`, the rows, and
    the third value of the forward pass. The rows of an expert are copied together for one product:
    torch has no product of halves that keeps its fp32 sums, and a sum of rounded products would be
    rounded once per chunk.
    """
    d_fc2, d_fc1, rows, active = chunks[0]
    ends = [_ends(chunk[2], each) for chunk, each in zip(chunks, offsets, strict=True)]
    flat = [[x.reshape(-1, x.shape[-1]) for x in chunk] for chunk in chunks]
    experts = len(ends[0]) - 1
    d_w1 = empty(rows, (experts, d_fc1.shape[-1], rows.shape[-1]))
    d_w2 = empty(rows, (experts, d_fc2.shape[-1], active.shape[-1]))
    for expert in range(experts):
        own = [slice(each[expert], each[expert + 1]) for each in ends]
        d_fc2, d_fc1, rows, active = (
            torch.cat([x[of_chunk] for x, of_chunk in zip(of_chunks, own, strict=True)])
            for of_chunks in zip(*flat, strict=True)
        )
        torch.mm(d_fc2.t(), active, out=d_w2[expert])
        torch.mm(d_fc1.t(), rows, out=d_w1[expert])
    return d_w1, d_w2


def _ends(rows: Tensor, offsets: Tensor | None) -> list[int]:
    """Return 0 and the end row of each expert."""
    if offsets is not None:
        return [0, *offsets.tolist()]
    experts, capacity, _ = rows.shape
    return [capacity * expert for expert in range(experts + 1)]
