"""The experts' whole feed-forward network in plain torch, for CPUs: a block of rows at a time.

On a CPU a buffer of R x F numbers costs more than the elementwise work on it: the system maps and
clears its pages each time. A block of one expert's rows goes through both products while its hidden
values are in the cache, so that of the four such buffers of the step by step computation only the
pre-activations remain; the backward pass recomputes the activation from them. Threads take whole
parts of the work, on one thread each: blocks in the forward pass, experts in the backward pass,
which sums weight gradients over an expert's blocks. An expert with far more than a thread's share
of the rows is taken in several parts there, whose sums are added in order. So the same rows give
the same bits on the same number of threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._expert_chain import Functions, chain_bwd, chain_fwd
from ._expert_blocks import Blocks, GradientSums, accumulate
from ._grouped import rows_product, weight_gradient
from ._threads import parallel_for
from .activation import bias_act_bwd, bias_act_fwd

_FUNCTIONS = Functions(bias_act_fwd, bias_act_bwd, rows_product, weight_gradient)


def _by_blocks(rows: Tensor) -> bool:
    return rows.device.type == "cpu"


@dataclass(frozen=True)
class _Forward:
    """What the blocks of a forward pass read and write.

    Attributes:
        rows_RM, params: as of :func:`expert_ffn_fwd`.
        out_RM: the output.
        saved_RF: pre-activations for the backward pass, in half precision without the bias; or
            (0, F).
    """

    blocks: Blocks
    rows_RM: Tensor
    params: tuple[Tensor, ...]
    out_RM: Tensor
    saved_RF: Tensor

    def run(self, parts: list[tuple[int, list[slice]]], numbers: Iterator[int]) -> None:
        """The parts with these numbers, on one thread."""
        to, hidden_dim = self.blocks, self.saved_RF.shape[1]
        scratch = to.scratch(self.rows_RM, hidden_dim, to.acc)
        products = None if len(self.saved_RF) else to.scratch(self.rows_RM, hidden_dim, to.dtype)
        for number in numbers:
            expert, (block,) = parts[number]
            count = block.stop - block.start
            h = self.saved_RF[block] if products is None else products[:count]
            self._block(block, [p[expert] for p in self.params], h, scratch[:count])

    def _block(self, block: slice, params: list[Tensor], h: Tensor, a: Tensor) -> None:
        to, (w1, b1, w2, b2), y = self.blocks, params, self.out_RM[block]
        z = to.linear(self.rows_RM[block], w1, b1, out=h, wide=a)
        a = to.activate(z, a)
        keep_a, keep_y = to.masks(block, a, y)
        if keep_a is not None:
            a.mul_(keep_a)
        wide = y if to.dtype == to.acc else y.new_empty(y.shape, dtype=to.acc)
        biased = to.linear(a.to(to.dtype), w2, b2, out=y, wide=wide)
        if keep_y is not None:
            biased.mul_(keep_y)
        if to.dtype != to.acc:
            y.copy_(biased)


def expert_ffn_fwd(
    rows: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: tuple[float, float] = (0.0, 0.0),
    seed: Tensor | None = None,
    keep_hidden: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    Products are rounded to the dtype of the rows, everything else is computed in fp32 (fp64).

    Args:
        rows: (e, N, M), or (R, M) with ``offsets``.
        fc1_weight, fc1_bias: (e, F, M), (e, F).
        fc2_weight, fc2_bias: (e, M, F), (e, M).
        activation: a key of :data:`~fairseq_tutel.backends.torch.ACTIVATIONS`.
        offsets: (e,) int32 end row of each expert; rows past the last come out zero.
        dropout_p: after the activation and after fc2.
        seed: int64 scalar tensor; needed with dropout.
        keep_hidden: whether a backward pass follows.

    Returns:
        the output, like rows; what the backward pass needs of the hidden values, (R, F), or (0, F)
        without ``keep_hidden``; the same after the activation, (0, F) on a CPU, which recomputes
        them.
    """
    params = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    if not _by_blocks(rows):
        return chain_fwd(
            _FUNCTIONS,
            rows,
            *params,
            activation=activation,
            offsets=offsets,
            dropout_p=dropout_p,
            seed=seed,
            keep_hidden=keep_hidden,
        )
    _, hidden_dim, model_dim = fc1_weight.shape
    blocks = Blocks.of(rows, offsets, hidden_dim, activation, dropout_p, seed)
    rows_RM = rows.reshape(-1, model_dim)
    out_RM = rows.new_empty(rows_RM.shape)  # contiguous, as the operator promises
    saved_RF = rows.new_empty((len(rows_RM) if keep_hidden else 0, hidden_dim))
    forward = _Forward(blocks, rows_RM, params, out_RM, saved_RF)
    parts = blocks.parts(model_dim, whole=False)
    parallel_for(lambda numbers: forward.run(parts, numbers), len(parts))
    out_RM[blocks.end :] = 0
    return out_RM.view(rows.shape), saved_RF, saved_RF.new_empty((0, hidden_dim))


@dataclass(frozen=True)
class _Backward:
    """What the blocks of a backward pass read and write.

    Attributes:
        d_out_RM, rows_RM, params: as of :func:`expert_ffn_bwd`.
        saved_RF: of the forward pass.
        d_rows_RM: gradient of the rows, None where it is not needed.
        sums: of the gradients of the parameters, None where they are not needed.
    """

    blocks: Blocks
    d_out_RM: Tensor
    rows_RM: Tensor
    params: tuple[Tensor, ...]
    saved_RF: Tensor
    d_rows_RM: Tensor | None
    sums: GradientSums | None

    def run(self, parts: list[tuple[int, list[slice]]], numbers: Iterator[int]) -> None:
        """The parts with these numbers, on one thread."""
        to, hidden_dim = self.blocks, self.saved_RF.shape[1]
        scratch = to.scratch(self.rows_RM, hidden_dim, to.acc)
        products = to.scratch(self.rows_RM, hidden_dim, to.dtype)
        wide = scratch if to.dtype == to.acc else torch.empty_like(scratch)
        for number in numbers:
            expert, blocks = parts[number]
            sums = None if self.sums is None else self.sums.of_part[number]
            for block in blocks:
                buffers = [x[: block.stop - block.start] for x in (scratch, products, wide)]
                first = block is blocks[0]
                self._block(block, [p[expert] for p in self.params], sums, first, *buffers)

    def _block(self, block, params, sums, first, a, product, wide) -> None:
        to, (w1, b1, w2, _) = self.blocks, params
        dy, z = self.d_out_RM[block], self.saved_RF[block]
        if to.dtype != to.acc:
            z = wide.copy_(z).add_(b1)
        keep_a, keep_y = to.masks(block, z, dy)
        if keep_y is not None:
            dy = (dy * keep_y).to(to.dtype)
        if sums is not None:
            sum_w1, sum_b1, sum_w2, sum_b2 = sums
            sum_b2 += dy.sum(0, dtype=to.acc)
            a = to.activate(z, a)
            if keep_a is not None:
                a.mul_(keep_a)
            accumulate(sum_w2, dy.t(), a.to(to.dtype), first)
        d_a = torch.mm(dy, w2, out=product).to(to.acc)
        if keep_a is not None:
            d_a.mul_(keep_a)
        d_z = to.d_activate(d_a, z)
        d_h = d_z.to(to.dtype)
        if sums is not None:
            sum_b1 += d_z.sum(0)
            accumulate(sum_w1, d_h.t(), self.rows_RM[block], first)
        if self.d_rows_RM is not None:
            torch.mm(d_h, w1, out=self.d_rows_RM[block])


def expert_ffn_bwd(
    d_out: Tensor,
    rows: Tensor,
    saved: Tensor,
    active: Tensor,
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
    needs_params: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`expert_ffn_fwd`: of the rows, fc1's weight and bias, fc2's.

    Args:
        d_out: like the output.
        saved, active: second and third value of the forward pass.
        needs_rows, needs_params: a gradient that is not needed comes back with shape (0,).
    """
    params = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    if not _by_blocks(rows):
        return chain_bwd(
            _FUNCTIONS,
            d_out,
            rows,
            saved,
            active,
            *params,
            activation=activation,
            offsets=offsets,
            dropout_p=dropout_p,
            seed=seed,
            needs_rows=needs_rows,
            needs_params=needs_params,
        )
    _, hidden_dim, model_dim = fc1_weight.shape
    blocks = Blocks.of(rows, offsets, hidden_dim, activation, dropout_p, seed)
    parts = blocks.parts(model_dim, whole=needs_params)
    # the largest first, so that nobody is left with one at the end
    parts.sort(key=lambda part: sum(block.start - block.stop for block in part[1]))
    rows_RM, d_out_RM = rows.reshape(-1, model_dim), d_out.reshape(-1, model_dim)
    d_rows_RM = rows.new_empty(rows_RM.shape) if needs_rows else None
    sums = GradientSums(params, parts, blocks.acc) if needs_params else None
    backward = _Backward(blocks, d_out_RM, rows_RM, params, saved, d_rows_RM, sums)
    parallel_for(lambda numbers: backward.run(parts, numbers), len(parts))
    d_rows = rows.new_empty(0)
    if d_rows_RM is not None:
        d_rows_RM[blocks.end :] = 0
        d_rows = d_rows_RM.view(rows.shape)
    d_params = (p.new_empty(0) for p in params) if sums is None else sums.totals()
    return d_rows, *d_params
