"""The experts' rows in blocks, and what is computed on one."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import GATES
from .activation import ACTIVATIONS, acc_dtype

# Hidden elements per block, 8 MiB of fp32 (with 4, two threads took 2 to 5 % longer), and rows
# that keep the products efficient.
_BLOCK_NUMEL = 1 << 21
_MIN_ROWS = 256


class Part(NamedTuple):
    """Rows of a block whose products are taken at once: all of several experts with equally many,
    or some of one's."""

    experts: slice  # g of them, with n rows each
    rows: slice  # of the block's
    first: bool  # whether no part before it is of these experts

    def of(self, rows_NA: Tensor) -> Tensor:
        """(g, n, A) of the block's rows."""
        part, count = rows_NA[self.rows], self.experts.stop - self.experts.start
        return part.view(count, len(part) // count, rows_NA.shape[1])


class Block(NamedTuple):
    """Rows of neighbouring experts, on which all but products is computed at once."""

    rows: slice  # of a buffer of all rows
    parts: tuple[Part, ...]

    def product(self, rows_NA: Tensor, weights: Tensor, out_NB: Tensor) -> Tensor:
        """Each row times its expert's weight, of (e, A, B), into ``out_NB``."""
        for part in self.parts:
            torch.bmm(part.of(rows_NA), weights[part.experts], out=part.of(out_NB))
        return out_NB

    def add_products(self, total: Tensor, a_NA: Tensor, b_NB: Tensor, begin: bool = True) -> None:
        """Add ``a.T @ b`` to the experts' sums, (e, A, B), which begin with their first part."""
        for part in self.parts:
            of_experts, a, b = total[part.experts], part.of(a_NA), part.of(b_NB)
            first = begin and part.first
            if total.dtype != a.dtype:
                product = torch.bmm(a.mT, b)
                of_experts.copy_(product) if first else of_experts.add_(product)
            elif first:  # baddbmm_ would read what it overwrites, also with a beta of 0
                torch.bmm(a.mT, b, out=of_experts)
            else:
                of_experts.baddbmm_(a.mT, b)


def _padded_blocks(experts: int, capacity: int, step: int) -> Iterator[Block]:
    """As many experts as have ``step`` rows together, or one expert's rows in steps."""
    if capacity > step:
        yield from _ragged_blocks([(x + 1) * capacity for x in range(experts)], step)
        return
    group = max(1, step // max(1, capacity))
    for begin in range(0, experts, group):
        end = min(begin + group, experts)
        part = Part(slice(begin, end), slice(0, (end - begin) * capacity), True)
        yield Block(slice(begin * capacity, end * capacity), (part,))


def _ragged_blocks(ends: Sequence[int], step: int) -> Iterator[Block]:
    """Each expert's rows in equal parts of about ``step``, at least one: no small rest. As many
    parts in a block as have ``step`` rows together."""
    parts: list[Part] = []
    begin = 0  # of the block
    for expert, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        pieces = max(1, round((last - first) / step))
        marks = [first + (last - first) * piece // pieces for piece in range(pieces + 1)]
        for start, stop in itertools.pairwise(marks):
            if parts and stop - begin > step:
                yield Block(slice(begin, start), tuple(parts))
                parts, begin = [], start
            rows = slice(start - begin, stop - begin)
            parts.append(Part(slice(expert, expert + 1), rows, start == first))
    yield Block(slice(begin, ends[-1]), tuple(parts))


def blocks_of(rows: Tensor, hidden_dim: int, offsets: Tensor | None) -> tuple[Block, ...]:
    """Of (e, N, M), or of (R, M) with ``offsets``."""
    step = max(_MIN_ROWS, _BLOCK_NUMEL // max(1, hidden_dim))
    if offsets is None:
        return tuple(_padded_blocks(rows.shape[0], rows.shape[1], step))
    return tuple(_ragged_blocks(offsets.tolist(), step))


@dataclass(frozen=True)
class Blocks:
    """The blocks of all rows, in their order, and the elementwise work on one."""

    blocks: tuple[Block, ...]
    hidden_dim: int
    activation: str  # a key of ACTIVATIONS or GATES
    dropout_p: tuple[float, float]  # after the activation and after fc2
    seed: int
    dtype: torch.dtype  # of the rows and their products
    acc: torch.dtype  # of everything else

    @classmethod
    def of(
        cls,
        rows: Tensor,
        hidden_dim: int,
        *,
        activation: str,
        offsets: Tensor | None = None,
        dropout_p: tuple[float, float] = (0.0, 0.0),
        seed: Tensor | None = None,
    ) -> "Blocks":
        """Of (e, N, M), or of (R, M) with ``offsets``; options as of ``expert_ffn_fwd``."""
        return cls(
            blocks=blocks_of(rows, hidden_dim, offsets),
            hidden_dim=hidden_dim,
            activation=activation,
            dropout_p=dropout_p,
            seed=0 if seed is None else int(seed),
            dtype=rows.dtype,
            acc=acc_dtype(rows.dtype),
        )

    @property
    def end(self) -> int:
        """Rows that belong to an expert; those behind are unused."""
        return self.blocks[-1].rows.stop

    def linear(
        self, block: Block, x_NA: Tensor, weight: Tensor, bias: Tensor | None, out_NB: Tensor
    ) -> Tensor:
        """``x @ weight.T + bias`` of each row's expert in ``acc``: in ``out_NB``, or from the
        product there."""
        if bias is None or self.dtype != self.acc:
            return self.pre_activation(block, block.product(x_NA, weight.mT, out_NB), bias)
        for part in block.parts:
            b, w = bias[part.experts, None], weight[part.experts].mT
            torch.baddbmm(b, part.of(x_NA), w, out=part.of(out_NB))
        return out_NB

    def pre_activation(self, block: Block, saved_NF: Tensor, bias: Tensor | None) -> Tensor:
        """Of what a forward pass saved, which in half precision is without the bias, in ``acc``."""
        if self.dtype == self.acc:
            return saved_NF
        wide_NF = saved_NF.to(self.acc)
        for part in block.parts if bias is not None else ():
            part.of(wide_NF).add_(bias[part.experts, None])
        return wide_NF

    def activate(self, z: Tensor, keep: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """dropout(activation(z)), or dropout(activation(gate) * up) of the halves of z, in the
        dtype of the rows: in ``out``, or in a buffer of its own."""
        gate, *up = z.chunk(2, -1) if self.activation in GATES else (z,)
        in_out = out is not None and self.dtype == self.acc
        a = self._functions[0](gate, out if in_out else gate.new_empty(gate.shape))
        for factor in (*up, keep):
            a = a if factor is None else a.mul_(factor)
        if out is None or in_out:
            return a.to(self.dtype)
        return out.copy_(a)

    def activate_bwd(self, d_a: Tensor, z: Tensor) -> Tensor:
        """Gradient of z without dropout; overwrites that of a."""
        forward, gradient = self._functions
        if self.activation not in GATES:
            return gradient(d_a, z, d_a)
        gate, up = z.chunk(2, -1)
        d_z = torch.empty_like(z)
        d_gate, d_up = d_z.chunk(2, -1)
        forward(gate, d_up).mul_(d_a)
        gradient(d_a.mul_(up), gate, d_gate)
        return d_z

    @property
    def _functions(self):
        return ACTIVATIONS[GATES.get(self.activation, self.activation)]

    def masks(self, block: Block, out: Tensor) -> Iterator[Tensor | None]:
        """For the values after the activation and the output: 0 or 1 / (1 - p), None if p is 0."""
        generator = None
        if any(self.dropout_p):
            generator = torch.Generator(out.device).manual_seed(self.seed + block.rows.start)
        for width, p in zip((self.hidden_dim, out.shape[-1]), self.dropout_p, strict=True):
            keep = None
            if p > 0:
                keep = out.new_empty((*out.shape[:-1], width), dtype=self.acc)
                keep.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
            yield keep

    def bias_sums(
        self, params: Sequence[Tensor | None], wanted: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Zeros to which gradients of fc1's and fc2's bias are added; (0,) where none is wanted."""
        d_b1, d_b2 = (
            params[0].new_zeros(b.shape if wanted and b is not None else 0, dtype=self.acc)
            for b in params[1::2]
        )
        return d_b1, d_b2

    def backward(
        self,
        d_out_RM: Tensor,
        saved_RF: Tensor,
        params: Sequence[Tensor | None],
        d_rows_RM: Tensor,
        d_b1: Tensor,
        d_b2: Tensor,
    ) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """All gradients but weights', block by block; those of rows, unless that has shape (0,),
        are written, those of biases (:meth:`bias_sums`) added to.

        Yields the block; gradients of its output before dropout and of its values before the
        activation, in the dtype of the rows.
        """
        w1, b1, w2, _ = params
        for block in self.blocks:
            dy, z = d_out_RM[block.rows], self.pre_activation(block, saved_RF[block.rows], b1)
            keep_a, keep_y = self.masks(block, dy)
            if keep_y is not None:
                dy = (dy * keep_y).to(self.dtype)
            d_a = block.product(dy, w2, dy.new_empty(len(dy), self.hidden_dim)).to(self.acc)
            if keep_a is not None:
                d_a.mul_(keep_a)
            d_z = self.activate_bwd(d_a, z)
            for total, grad in ((d_b1, d_z), (d_b2, dy)):
                for part in block.parts if total.numel() > 0 else ():
                    total[part.experts] += part.of(grad).sum(1, dtype=self.acc)
            d_h = d_z.to(self.dtype)
            if d_rows_RM.numel() > 0:
                block.product(d_h, w1, d_rows_RM[block.rows])
            yield block, dy, d_h
