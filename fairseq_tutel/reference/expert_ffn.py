"""The experts' whole feed-forward network in plain torch, for CPUs: a block of rows at a time.

Legend: e local experts, N rows per expert, R rows, M model dim, F hidden dim; in a block of rows g
experts with n rows each.

On a CPU a buffer of R x F numbers costs more than the elementwise work on it: the system maps and
clears its pages each time. A block goes through both products while its hidden values are in the
cache, so that of the four such buffers of the step by step computation only the pre-activations
remain; the backward pass recomputes the activation from them. A block takes one expert per thread,
since one batched product of independent matrices needs no barriers inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .activation import ACTIVATIONS

# Hidden elements per expert of a block: 4 MiB of fp32; and rows that keep the products efficient.
_BLOCK_NUMEL = 1 << 20
_MIN_ROWS = 256

_aten = torch.ops.aten


def _activate(activation: str, z: Tensor, out: Tensor) -> Tensor:
    """activation(z) in ``out``; z stays as it is."""
    if activation == "gelu":
        return _aten.gelu.out(z, out=out)
    return ACTIVATIONS[activation][0](out.copy_(z))


def _d_activate(activation: str, d_a: Tensor, z: Tensor) -> Tensor:
    """d_a * activation'(z), in place of d_a; z stays as it is."""
    if activation == "gelu":
        return _aten.gelu_backward.grad_input(d_a, z, grad_input=d_a)
    return d_a.copy_(ACTIVATIONS[activation][1](d_a, z.clone()))


def _acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True)
class _Block:
    """Part of the rows.

    Attributes:
        experts: whose weights it needs.
        part: index into the rows as (e, N, M), or (1, R, M) where they are ragged.
        first: whether it holds the first rows of its experts.
        saved: its place among the saved hidden values, in elements; the same for any g.
        shape: (g, n).
    """

    experts: slice
    part: tuple[slice, slice]
    first: bool
    saved: slice
    shape: tuple[int, int]


def _blocks(rows: Tensor, weight: Tensor, offsets: Tensor | None) -> list[_Block]:
    """All rows that belong to an expert. NOTE: reads the offsets on the host."""
    num_experts, hidden, _ = weight.shape
    step = max(_MIN_ROWS, _BLOCK_NUMEL // max(1, hidden))
    if offsets is None:
        return list(_padded_blocks(rows, num_experts, hidden, step))
    return list(_ragged_blocks(offsets.tolist(), hidden, step))


def _padded_blocks(rows, num_experts, hidden, step) -> Iterator[_Block]:
    group = torch.get_num_threads()
    for expert in range(0, num_experts, group):
        experts = slice(expert, min(expert + group, num_experts))
        for first in range(0, rows.shape[1], step):
            span = slice(first, min(first + step, rows.shape[1]))
            shape = (experts.stop - expert, span.stop - first)
            # all experts' first rows, then all experts' next ones
            begin = (num_experts * first + expert * shape[1]) * hidden
            saved = slice(begin, begin + shape[0] * shape[1] * hidden)
            yield _Block(experts, (experts, span), first == 0, saved, shape)


def _ragged_blocks(ends, hidden, step) -> Iterator[_Block]:
    start = 0
    for expert, end in enumerate(ends):
        for first in range(start, end, step):
            span = slice(first, min(first + step, end))
            saved = slice(first * hidden, span.stop * hidden)
            yield _Block(
                slice(expert, expert + 1),
                (slice(0, 1), span),
                first == start,
                saved,
                (1, span.stop - first),
            )
        start = end


class _Scratch:
    """One buffer for as many elements as the largest block has, lent out block by block."""

    def __init__(self, like: Tensor, blocks: list[_Block], width: int, dtype: torch.dtype):
        size = max((b.shape[0] * b.shape[1] for b in blocks), default=0)
        self._buffer = like.new_empty(size * width, dtype=dtype)
        self._width = width

    def of(self, block: _Block) -> Tensor:
        """(g, n, width), undefined."""
        size = block.shape[0] * block.shape[1] * self._width
        return self._buffer[:size].view(*block.shape, self._width)


class _Dropout:
    """The same masks for the same seed, however experts are put into blocks."""

    def __init__(self, probabilities: tuple[float, float], seed: Tensor | None):
        self._probabilities = probabilities
        if any(probabilities):
            self._seed, self._generator = int(seed), torch.Generator()

    def scales(self, block: _Block, *likes: Tensor) -> list[Tensor | None]:
        """For the hidden values and the output of a block: 0 or 1 / (1 - p), None if p is 0."""
        if not any(self._probabilities):
            return [None, None]
        shapes = zip(likes, self._probabilities, strict=True)
        found = [torch.empty_like(x, dtype=_acc_dtype(x.dtype)) if p else None for x, p in shapes]
        size = (block.saved.stop - block.saved.start) // block.shape[0]
        for expert in range(block.shape[0]):
            self._generator.manual_seed(self._seed + block.saved.start + expert * size)
            for keep, p in zip(found, self._probabilities, strict=True):
                if keep is not None:
                    keep[expert].bernoulli_(1.0 - p, generator=self._generator)
                    keep[expert].div_(1.0 - p)
        return found


def _add_bias(h: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """h (g, n, F) + bias (g, F) in fp32 (fp64 for fp64), in ``out``, which may be h."""
    bias = bias.to(out.dtype)[:, None]
    if h.dtype == out.dtype:
        return torch.add(h, bias, out=out)
    return out.copy_(h).add_(bias)


def _bmm_into(out: Tensor, a: Tensor, b: Tensor, scratch: Tensor) -> None:
    """out = a @ b; a strided output would be computed matrix by matrix, so it is copied instead."""
    if out.is_contiguous():
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b, out=scratch))


def _as_3d(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[None]


def _zero_tail(x: Tensor, offsets: Tensor | None) -> None:
    if offsets is not None:
        x[int(offsets[-1]) :] = 0


def expert_ffn_fwd(
    rows: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor, *,
    activation: str, offsets: Tensor | None = None, dropout_p: tuple[float, float] = (0.0, 0.0),
    seed: Tensor | None = None, keep_hidden: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    Products are rounded to the dtype of the rows, everything else is computed in fp32 (fp64).

    Args:
        rows: (e, N, M), or (R, M) with ``offsets``.
        fc1_weight, fc1_bias: (e, F, M), (e, F).
        fc2_weight, fc2_bias: (e, M, F), (e, M).
        activation: a key of :data:`~fairseq_tutel.reference.ACTIVATIONS`.
        offsets: (e,) int32 end row of each expert; rows past the last come out zero.
        dropout_p: after the activation and after fc2.
        seed: int64 scalar tensor; needed with dropout.
        keep_hidden: whether a backward pass follows.

    Returns:
        the output, like rows; what the backward pass needs of the hidden values, (rows * F,), or
        empty without ``keep_hidden``.
    """
    _, hidden_dim, model_dim = fc1_weight.shape
    blocks = _blocks(rows, fc1_weight, offsets)
    acc, dtype = _acc_dtype(rows.dtype), rows.dtype
    num_rows = rows.numel() // max(1, model_dim)
    saved = rows.new_empty(num_rows * hidden_dim if keep_hidden else 0)
    products = _Scratch(rows, [] if keep_hidden else blocks, hidden_dim, dtype)
    scratch = _Scratch(rows, blocks, hidden_dim, acc)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    out_products = _Scratch(rows, blocks, model_dim, dtype)
    rows_enM, out_enM = _as_3d(rows), _as_3d(out)
    dropout = _Dropout(dropout_p, seed)
    for block in blocks:
        h = saved[block.saved].view(*block.shape, -1) if keep_hidden else products.of(block)
        torch.bmm(rows_enM[block.part], fc1_weight[block.experts].transpose(1, 2), out=h)
        # in fp32 the sum with the bias is saved, in half precision what it is computed from
        z = _add_bias(h, fc1_bias[block.experts], h if dtype == acc else scratch.of(block))
        a = _activate(activation, z, scratch.of(block))
        y = out_products.of(block)
        keep_a, keep_y = dropout.scales(block, a, y)
        if keep_a is not None:
            a.mul_(keep_a)
        torch.bmm(a.to(dtype), fc2_weight[block.experts].transpose(1, 2), out=y)
        if keep_y is None and dtype == acc:
            _add_bias(y, fc2_bias[block.experts], out_enM[block.part])
        else:
            biased = _add_bias(y, fc2_bias[block.experts], torch.empty_like(y, dtype=acc))
            out_enM[block.part] = biased if keep_y is None else biased.mul_(keep_y)
    _zero_tail(out, offsets)
    return out, saved


def expert_ffn_bwd(
    d_out: Tensor, rows: Tensor, saved: Tensor, fc1_weight: Tensor, fc1_bias: Tensor,
    fc2_weight: Tensor, fc2_bias: Tensor, *, activation: str, offsets: Tensor | None = None,
    dropout_p: tuple[float, float] = (0.0, 0.0), seed: Tensor | None = None,
    needs_rows: bool = True, needs_params: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of :func:`expert_ffn_fwd`: of the rows, fc1's weight and bias, fc2's.

    Args:
        d_out: like the output.
        saved: second value of the forward pass.
        needs_rows, needs_params: a gradient that is not needed comes back with shape (0,).
    """
    num_experts, hidden_dim, model_dim = fc1_weight.shape
    blocks = _blocks(rows, fc1_weight, offsets)
    acc, dtype = _acc_dtype(rows.dtype), rows.dtype
    scratch = _Scratch(rows, blocks, hidden_dim, acc)
    sums = _Scratch(rows, [] if dtype == acc else blocks, hidden_dim, acc)
    products = _Scratch(rows, blocks, hidden_dim, dtype)
    row_products = _Scratch(rows, blocks, model_dim, dtype)
    d_rows = rows.new_empty(rows.shape if needs_rows else 0)
    d_w1, d_w2 = (w.new_empty(w.shape if needs_params else 0) for w in (fc1_weight, fc2_weight))
    d_b1, d_b2 = (
        b.new_zeros(b.shape if needs_params else 0, dtype=acc) for b in (fc1_bias, fc2_bias)
    )
    rows_enM, d_out_enM, d_rows_enM = _as_3d(rows), _as_3d(d_out), _as_3d(d_rows)
    if needs_params:
        _zero_unreached((d_w1, d_w2), blocks, num_experts)
    dropout = _Dropout(dropout_p, seed)
    for block in blocks:
        experts = block.experts
        dy = d_out_enM[block.part]
        z = saved[block.saved].view(*block.shape, -1)
        if dtype != acc:
            z = _add_bias(z, fc1_bias[experts], sums.of(block))
        keep_a, keep_y = dropout.scales(block, z, dy)
        if keep_y is not None:
            dy = (dy * keep_y).to(dtype)
        if needs_params:
            d_b2[experts] += dy.sum(1, dtype=acc)
            a = _activate(activation, z, scratch.of(block))
            if keep_a is not None:
                a.mul_(keep_a)
            _accumulate(d_w2[experts], dy.transpose(1, 2), a.to(dtype), block.first)
        d_a = torch.bmm(dy, fc2_weight[experts], out=products.of(block)).to(acc)
        if keep_a is not None:
            d_a.mul_(keep_a)
        d_z = _d_activate(activation, d_a, z)
        d_h = d_z.to(dtype)
        if needs_params:
            d_b1[experts] += d_z.sum(1)
            _accumulate(d_w1[experts], d_h.transpose(1, 2), rows_enM[block.part], block.first)
        if needs_rows:
            d_part = d_rows_enM[block.part]
            _bmm_into(d_part, d_h, fc1_weight[experts], row_products.of(block))
    if needs_rows:
        _zero_tail(d_rows, offsets)
    return d_rows, d_w1, d_b1.to(fc1_bias.dtype), d_w2, d_b2.to(fc2_bias.dtype)


def _zero_unreached(weights, blocks, num_experts) -> None:
    """Gradients of experts without rows."""
    reached = {x for b in blocks for x in range(b.experts.start, b.experts.stop)}
    for expert in set(range(num_experts)) - reached:
        for weight in weights:
            weight[expert] = 0


def _accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b for the first block of an expert, total += a @ b for the next ones."""
    if first:
        torch.bmm(a, b, out=total)
    else:
        total.baddbmm_(a, b)
