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


class Block(NamedTuple):
    """Rows computed at once: all of several experts with equally many, or some of one's."""

    experts: slice  # g of them, with n rows each
    rows: slice  # of a buffer of all rows
    first: bool  # whether no block before it is of these experts

    def of(self, buffer_RA: Tensor) -> Tensor:
        """(g, n, A) of a buffer of all rows."""
        part, count = buffer_RA[self.rows], self.experts.stop - self.experts.start
        return part.view(count, len(part) // count, buffer_RA.shape[1])

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add ``a.T @ b`` to the experts' sums, which begin with the first block."""
        of_experts = total[self.experts]
        if total.dtype != a.dtype:
            product = torch.bmm(a.mT, b)
            of_experts.copy_(product) if self.first else of_experts.add_(product)
        elif self.first:  # baddbmm_ would read what it overwrites, also with a beta of 0
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
        yield Block(slice(begin, end), slice(begin * capacity, end * capacity), True)


def _ragged_blocks(ends: Sequence[int], step: int) -> Iterator[Block]:
    """Each expert's rows in equal parts of about ``step``, at least one: no small rest."""
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        parts = max(1, round((end - begin) / step))
        marks = [begin + (end - begin) * part // parts for part in range(parts + 1)]
        for start, stop in itertools.pairwise(marks):
            yield Block(slice(expert, expert + 1), slice(start, stop), start == begin)


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

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """``x @ weight.T + bias`` in ``acc``: in ``out``, or from the product there."""
        if bias is not None and self.dtype == self.acc:
            return torch.baddbmm(bias[:, None], x, weight.mT, out=out)
        return self.pre_activation(torch.bmm(x, weight.mT, out=out), bias)

    def pre_activation(self, saved: Tensor, bias: Tensor | None) -> Tensor:
        """``saved`` of a forward pass, which in half precision is without the bias, in ``acc``."""
        if self.dtype == self.acc:
            return saved
        return saved.to(self.acc) if bias is None else saved.to(self.acc).add_(bias[:, None])

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
        for block in self.blocks:
            w1, b1, w2, _ = of_experts(params, block)
            dy, z = block.of(d_out_RM), self.pre_activation(block.of(saved_RF), b1)
            keep_a, keep_y = self.masks(block, dy)
            if keep_y is not None:
                dy = (dy * keep_y).to(self.dtype)
            d_a = torch.bmm(dy, w2).to(self.acc)
            if keep_a is not None:
                d_a.mul_(keep_a)
            d_z = self.activate_bwd(d_a, z)
            for total, part in ((d_b1, d_z), (d_b2, dy)):
                if total.numel() > 0:
                    total[block.experts] += part.sum(1, dtype=self.acc)
            d_h = d_z.to(self.dtype)
            if d_rows_RM.numel() > 0:
                torch.bmm(d_h, w1, out=block.of(d_rows_RM))
            yield block, dy, d_h


def of_experts(params: Sequence[Tensor | None], block: Block) -> list[Tensor | None]:
    """Those of the block's experts."""
    return [None if param is None else param[block.experts] for param in params]
