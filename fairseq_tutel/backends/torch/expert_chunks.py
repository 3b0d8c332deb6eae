"""The experts' network on rows that come in chunks, in plain torch; on a CPU block by block.

The backward pass of ``expert_ffn.py`` in two: what has to be known before the gradient of the rows
can be sent, and weight gradients, for which the gradient of the hidden values is kept.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._expert_chain import chain_chunks_bwd_params, chain_rows_bwd
from . import expert_ffn
from ._expert_blocks import Blocks, GradientSums, accumulate, whole_parts
from ._threads import parallel_for


def expert_chunk_bwd(
    d_out: Tensor,
    saved: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: tuple[float, float] = (0.0, 0.0),
    seed: Tensor | None = None,
    needs_rows: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``expert_ffn_fwd`` but those of weights.

    Args:
        d_out: like the output.
        saved: second value of the forward pass.
        needs_rows: whether the gradient of the rows is wanted; else it has shape (0,).

    Returns:
        gradients of the rows, of the output before its dropout, of the values before the activation
        (R, F), of fc1's bias and of fc2's (e, F), (e, M).
    """
    params = (fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    if not expert_ffn._by_blocks(d_out):
        return chain_rows_bwd(
            expert_ffn._FUNCTIONS,
            d_out,
            saved,
            *params,
            activation=activation,
            offsets=offsets,
            dropout_p=dropout_p,
            seed=seed,
            needs_rows=needs_rows,
        )
    _, hidden_dim, model_dim = fc1_weight.shape
    to = Blocks.of(d_out, offsets, hidden_dim, activation, dropout_p, seed)
    parts = to.parts(model_dim, whole=False)
    given_RM = d_out.reshape(-1, model_dim)
    d_out_RM = torch.empty_like(given_RM) if dropout_p[1] > 0 else given_RM
    d_rows_RM = d_out.new_empty(given_RM.shape if needs_rows else 0)
    d_hidden_RF = torch.empty_like(saved)
    # a sum per block, added up in order: threads take blocks of one expert at the same time
    sums_b1, sums_b2 = (b.new_empty((len(parts), b.shape[1]), dtype=to.acc) for b in params[1::2])

    def run(numbers: Iterator[int]) -> None:
        scratch = to.scratch(d_out, hidden_dim, to.acc)
        for number in numbers:
            expert, (block,) = parts[number]
            dy, z = given_RM[block], saved[block]
            if to.dtype != to.acc:
                z = scratch[: len(z)].copy_(z).add_(fc1_bias[expert])
            keep_a, keep_y = to.masks(block, z, dy)
            if keep_y is not None:
                dy = d_out_RM[block].copy_(dy * keep_y)
            torch.sum(dy, 0, dtype=to.acc, out=sums_b2[number])
            d_h = d_hidden_RF[block]
            torch.mm(dy, fc2_weight[expert], out=d_h)
            d_a = d_h.to(to.acc)  # the same memory where that is the dtype
            if keep_a is not None:
                d_a.mul_(keep_a)
            d_z = to.d_activate(d_a, z)
            if to.dtype != to.acc:
                d_h.copy_(d_z)
            torch.sum(d_z, 0, out=sums_b1[number])
            if needs_rows:
                torch.mm(d_h, fc1_weight[expert], out=d_rows_RM[block])

    parallel_for(run, len(parts))
    d_b1, d_b2 = (b.new_zeros(b.shape, dtype=to.acc) for b in params[1::2])
    for number, (expert, _) in enumerate(parts):
        d_b1[expert] += sums_b1[number]
        d_b2[expert] += sums_b2[number]
    if needs_rows:
        d_rows_RM = d_rows_RM.view(d_out.shape)
    return d_rows_RM, d_out_RM.view(d_out.shape), d_hidden_RF, d_b1, d_b2


def expert_chunks_bwd_params(
    chunks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
    offsets: Sequence[Tensor | None],
    seeds: Sequence[Tensor | None],
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    *,
    activation: str,
    dropout_p: tuple[float, float] = (0.0, 0.0),
) -> tuple[Tensor, Tensor]:
    """Gradients of fc1's weight and of fc2's, summed over the rows of all chunks.

    Args:
        chunks: of each its gradients of the output before its dropout and of the values before the
            activation, its rows, and second and third value of its forward pass.
        offsets, seeds: of each.
    """
    if not expert_ffn._by_blocks(chunks[0][0]):
        return chain_chunks_bwd_params(expert_ffn._FUNCTIONS, chunks, offsets)
    num_experts, hidden_dim, model_dim = fc1_weight.shape
    blocks = [
        Blocks.of(chunk[2], ends, hidden_dim, activation, dropout_p, seed)
        for chunk, ends, seed in zip(chunks, offsets, seeds, strict=True)
    ]
    flat = [tuple(x.reshape(-1, x.shape[-1]) for x in chunk) for chunk in chunks]
    # (number of the chunk, block in it)
    by_expert = [
        [(number, block) for number, to in enumerate(blocks) for block in to.by_expert[expert]]
        for expert in range(num_experts)
    ]
    sizes = [sum(each) for each in zip(*(to.sizes for to in blocks), strict=True)]
    parts = whole_parts(by_expert, sizes, model_dim)
    # in fp32, or sums in half precision would be rounded once per chunk
    sums = GradientSums((fc1_weight, fc2_weight), parts, blocks[0].acc, wide=True)

    def run(numbers: Iterator[int]) -> None:
        buffers = [to.scratch(fc1_weight, hidden_dim, to.acc) for to in blocks]
        for number in numbers:
            expert, of_expert = parts[number]
            sum_w1, sum_w2 = sums.of_part[number]
            for chunk, block in of_expert:
                to, first = blocks[chunk], (chunk, block) == of_expert[0]
                d_out, d_hidden, rows, z, _ = (x[block] for x in flat[chunk])
                a = buffers[chunk][: len(z)]
                if to.dtype != to.acc:
                    z = a.copy_(z).add_(fc1_bias[expert])
                a = to.activate(z, a)
                keep_a, _ = to.masks(block, a, d_out)
                if keep_a is not None:
                    a.mul_(keep_a)
                accumulate(sum_w2, d_out.t(), a.to(to.dtype), first)
                accumulate(sum_w1, d_hidden.t(), rows, first)

    parallel_for(run, len(parts))
    return sums.totals()
