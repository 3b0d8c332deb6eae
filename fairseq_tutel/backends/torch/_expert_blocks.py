"""The experts' rows in blocks, and what is computed on one."""

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
    """Rows of several experts, on which all but products is computed at once."""

    rows: slice  # of a buffer of all rows
    experts: Sequence[int]
    # rows of each expert; None: neighbours with equally many, for one batched product
    sizes: Sequence[int] | None
    begins: bool = True  # whether no block before it has rows of its first expert

    def split(self, rows_NA: Tensor) -> Sequence[Tensor]:
        """The block's rows, (n, A) of each expert, or (p, n, A) of (p, N, A); all of them,
        (g, n, A), in a batch."""
        if self.sizes is not None:
            return rows_NA.split_with_sizes(self.sizes, -2)  # split() is in Python
        count = len(self.experts)
        return (rows_NA.view(count, rows_NA.shape[0] // count, rows_NA.shape[1]),)

    def each(self, params: Tensor) -> Sequence[Tensor]:
        """The experts' part of (e, ...) beside each of :meth:`split`."""
        if self.sizes is None:
            return (params[self.experts[0] : self.experts[-1] + 1],)
        # all in one call, unless they are many more than these
        every = params if 4 * len(self.experts) < params.shape[0] else params.unbind()
        return [every[expert] for expert in self.experts]

    def _products(self, rows_NA):
        """A product of each part, and one that is added to something."""
        batched = self.sizes is None or rows_NA.dim() == 3
        return (torch.bmm, torch.baddbmm) if batched else (torch.mm, torch.addmm)

    def product(self, rows_NA: Tensor, weights: Tensor, out_NB: Tensor) -> Tensor:
        """Each row times its expert's weight, of (e, A, B), into ``out_NB``; or rows of p planes
        times (e, p, A, B), where experts are not in a batch."""
        mm, _ = self._products(rows_NA)
        parts = zip(self.split(rows_NA), self.each(weights), self.split(out_NB), strict=True)
        for rows, weight, out in parts:
            mm(rows, weight, out=out)
        return out_NB

    def affine(self, rows_NA: Tensor, weights: Tensor, biases: Tensor, out_NB: Tensor) -> Tensor:
        """:meth:`product` plus the expert's bias, of (e, B) or (e, p, B)."""
        _, addmm = self._products(rows_NA)
        sides, params = (rows_NA, out_NB), (biases.unsqueeze(-2), weights)
        parts = *map(self.split, sides), *map(self.each, params)
        for rows, out, bias, weight in zip(*parts, strict=True):
            addmm(bias, rows, weight, out=out)
        return out_NB

    def add_products(self, total: Tensor, a_NA: Tensor, b_NB: Tensor, begin: bool = True) -> None:
        """Add ``a.T @ b`` to the experts' sums, (e, A, B), which begin with their first rows."""
        mm, addmm = self._products(a_NA)
        parts = zip(self.each(total), self.split(a_NA), self.split(b_NB), strict=True)
        for number, (sums, a, b) in enumerate(parts):
            first = begin and (self.begins or number > 0)
            if total.dtype != a.dtype:
                product = mm(a.mT, b)
                sums.copy_(product) if first else sums.add_(product)
            elif first:  # addmm would read what it overwrites, also with a beta of 0
                mm(a.mT, b, out=sums)
            else:
                addmm(sums, a.mT, b, out=sums)

    def add_rows(self, total: Tensor, rows_NA: Tensor) -> None:
        """Add each expert's rows to its sum, (e, A)."""
        for sums, rows in zip(self.each(total), self.split(rows_NA), strict=True):
            sums += rows.sum(-2, dtype=total.dtype)

    def add_each(self, rows_NA: Tensor, biases: Tensor) -> Tensor:
        """Add its expert's bias, of (e, A), to each row."""
        for rows, bias in zip(self.split(rows_NA), self.each(biases.unsqueeze(-2)), strict=True):
            rows += bias
        return rows_NA


def _padded_blocks(experts: int, capacity: int, step: int) -> Iterator[Block]:
    """As many experts as have ``step`` rows together, or one expert's rows in steps."""
    if capacity > step:
        yield from _ragged_blocks([(x + 1) * capacity for x in range(experts)], step)
        return
    group = max(1, step // max(1, capacity))
    for begin in range(0, experts, group):
        end = min(begin + group, experts)
        yield Block(slice(begin * capacity, end * capacity), range(begin, end), None)


def _ragged_blocks(ends: Sequence[int], step: int) -> Iterator[Block]:
    """Each expert's rows in equal parts of about ``step``, at least one: no small rest. As many
    experts in a block as have ``step`` rows together: never two parts of one, which have more."""
    experts: list[int] = []
    sizes: list[int] = []
    begin, begins = 0, True  # of the block
    for expert, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        pieces = max(1, round((last - first) / step))
        for piece in range(pieces):
            start = first + (last - first) * piece // pieces
            stop = first + (last - first) * (piece + 1) // pieces
            if experts and stop - begin > step:
                yield Block(slice(begin, start), experts, sizes, begins)
                experts, sizes, begin, begins = [], [], start, start == first
            experts.append(expert)
            sizes.append(stop - start)
    yield Block(slice(begin, ends[-1]), experts, sizes, begins)


def planes(wide_NF: Tensor, hidden_dim: int) -> Tensor:
    """(p, n, F) of a block's values before the activation, which lie in (n, p F): those of a gated
    network's gate, then those that are gated. Elementwise functions of torch take half the time
    where each plane is contiguous (silu and its gradient, 2048 x 680, 1 thread)."""
    return wide_NF.view(_planes(wide_NF, hidden_dim), wide_NF.shape[0], hidden_dim)


def in_planes(param: Tensor | None, hidden_dim: int) -> Tensor | None:
    """fc1's weight or bias, (e, p F, ...), as (e, p, F, ...)."""
    if param is None:
        return None
    experts, _, *inputs = param.shape
    return param.view(experts, _planes(param, hidden_dim), hidden_dim, *inputs)


def by_plane(param: Tensor | None, hidden_dim: int) -> tuple[Tensor | None, ...]:
    """fc1's weight or bias as p of (e, F, ...); None as one."""
    return (None,) if param is None else in_planes(param, hidden_dim).unbind(1)


def _planes(wide: Tensor, hidden_dim: int) -> int:
    return wide.shape[1] // hidden_dim if hidden_dim else 1


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

    def without_unused(self, rows_RA: Tensor) -> Tensor:
        """The rows with zeros in those behind the last expert's."""
        end = self.blocks[-1].rows.stop
        if end < rows_RA.shape[0]:
            rows_RA[end:] = 0
        return rows_RA

    def fc1(
        self, block: Block, x_NM: Tensor, weight: Tensor, bias: Tensor | None, out_NF: Tensor
    ) -> tuple[Tensor, ...]:
        """The values before the activation by plane in ``acc``; ``out_NF`` holds what
        :meth:`pre_activation` takes."""
        out = planes(out_NF, self.hidden_dim)
        if out.shape[0] > 1 and block.sizes is not None:  # one product for all planes of an expert
            x = x_NM.expand(out.shape[0], *x_NM.shape)
            params = (in_planes(param, self.hidden_dim) for param in (weight, bias))
            return self.linear(block, x, *params, out).unbind()
        of_planes = zip(out, *self._by_plane(weight, bias), strict=True)
        return tuple(self.linear(block, x_NM, w, b, out) for out, w, b in of_planes)

    def linear(
        self, block: Block, x_NA: Tensor, weight: Tensor, bias: Tensor | None, out_NB: Tensor
    ) -> Tensor:
        """``x @ weight.T + bias`` of each row's expert in ``acc``: in ``out_NB``, or from the
        product there."""
        if bias is None or self.dtype != self.acc:
            return self._widened(block, block.product(x_NA, weight.mT, out_NB), bias)
        return block.affine(x_NA, weight.mT, bias, out_NB)

    def pre_activation(
        self, block: Block, saved_NF: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """What :meth:`fc1` returned, of what it left."""
        _, biases = self._by_plane(weight, bias)
        pairs = zip(planes(saved_NF, self.hidden_dim), biases, strict=True)
        return tuple(self._widened(block, plane, bias) for plane, bias in pairs)

    def _by_plane(self, weight, bias):
        weights = by_plane(weight, self.hidden_dim)
        biases = by_plane(bias, self.hidden_dim)
        return weights, biases * (len(weights) if bias is None else 1)

    def _widened(self, block, product_NB, bias):
        """Products in half precision are without the bias."""
        if self.dtype == self.acc:
            return product_NB
        wide_NB = product_NB.to(self.acc)
        return wide_NB if bias is None else block.add_each(wide_NB, bias)

    def activate(
        self, z: Sequence[Tensor], keep: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """dropout(activation(z)), or dropout(activation(gate) * up) of two planes, in the dtype of
        the rows: in ``out``, or in a buffer of its own."""
        gate, *up = z
        in_out = out is not None and self.dtype == self.acc
        a = self._functions[0](gate, out if in_out else gate.new_empty(gate.shape))
        for factor in (*up, keep):
            a = a if factor is None else a.mul_(factor)
        if out is None or in_out:
            return a.to(self.dtype)
        return out.copy_(a)

    def activate_bwd(self, d_a: Tensor, z: Sequence[Tensor]) -> Tensor:
        """Gradient of z without dropout, (n, p F) side by side: one product each for the gradient
        of the rows and of the weight; overwrites that of a."""
        forward, gradient = self._functions
        gate, *up = z
        if not up:
            return gradient(d_a, gate, d_a)
        d_z = d_a.new_empty((d_a.shape[0], 2 * self.hidden_dim))
        d_gate, d_up = d_z.chunk(2, 1)
        activated = forward(gate, torch.empty_like(gate))
        torch.mul(activated, d_a, out=d_up)
        d_gate.copy_(gradient(d_a.mul_(up[0]), gate, activated))
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
        activation, (n, p F), in the dtype of the rows.
        """
        w1, b1, w2, _ = params
        for block in self.blocks:
            dy, z = d_out_RM[block.rows], self.pre_activation(block, saved_RF[block.rows], w1, b1)
            keep_a, keep_y = self.masks(block, dy)
            if keep_y is not None:
                dy = (dy * keep_y).to(self.dtype)
            d_a = block.product(dy, w2, dy.new_empty((dy.shape[0], self.hidden_dim))).to(self.acc)
            if keep_a is not None:
                d_a.mul_(keep_a)
            d_z = self.activate_bwd(d_a, z)
            if d_b1.numel() > 0:
                block.add_rows(d_b1, d_z)
            if d_b2.numel() > 0:
                block.add_rows(d_b2, dy)
            d_h = d_z.to(self.dtype)
            if d_rows_RM.numel() > 0:
                block.product(d_h, w1, d_rows_RM[block.rows])
            yield block, dy, d_h
