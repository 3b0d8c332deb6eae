"""How the experts' work is cut into blocks of rows, and what a block needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .activation import ACTIVATIONS

# Hidden elements per block: 4 MiB of fp32; and rows that keep the products efficient.
_BLOCK_NUMEL = 1 << 20
_MIN_ROWS = 256
# An expert is split if the largest one has this many times a thread's equal share of the rows.
_UNEVEN = 1.25

_aten = torch.ops.aten
_Block = TypeVar("_Block")


@dataclass(frozen=True)
class Blocks:
    """The rows of each expert in blocks, and the elementwise work on one.

    Attributes:
        spans: begin and end of each expert's rows.
        block_rows: rows of a block, at most.
        activation: a key of ACTIVATIONS.
        dropout_p: after the activation and after fc2.
        seed: of the masks.
        dtype: of the rows and their products.
        acc: dtype of everything but products.
    """

    spans: tuple[tuple[int, int], ...]
    block_rows: int
    activation: str
    dropout_p: tuple[float, float]
    seed: int
    dtype: torch.dtype
    acc: torch.dtype

    @classmethod
    def of(
        cls,
        rows: Tensor,
        offsets: Tensor | None,
        hidden_dim: int,
        activation: str,
        dropout_p: tuple[float, float],
        seed: Tensor | None,
    ) -> "Blocks":
        """Of (e, N, M), or of (R, M) with ``offsets``. NOTE: reads these and the seed here."""
        if offsets is None:
            ends = [(x + 1) * rows.shape[1] for x in range(rows.shape[0])]
        else:
            ends = offsets.tolist()
        half = rows.dtype in (torch.float16, torch.bfloat16)
        return cls(
            spans=tuple(zip([0, *ends[:-1]], ends, strict=True)),
            block_rows=max(_MIN_ROWS, _BLOCK_NUMEL // max(1, hidden_dim)),
            activation=activation,
            dropout_p=dropout_p,
            seed=0 if seed is None else int(seed),
            dtype=rows.dtype,
            acc=torch.float32 if half else rows.dtype,
        )

    @property
    def end(self) -> int:
        """Rows that are used."""
        return self.spans[-1][1]

    def parts(self, model_dim: int, whole: bool) -> list[tuple[int, list[slice]]]:
        """(expert, consecutive blocks of its rows) for a thread each, the blocks in order.

        Args:
            whole: keep the blocks of an expert together, unless threads would wait for an
                overloaded one.
        """
        if not whole:
            return [(x, [block]) for x, blocks in enumerate(self.by_expert) for block in blocks]
        return whole_parts(self.by_expert, self.sizes, model_dim)

    @property
    def sizes(self) -> list[int]:
        """Rows of each expert."""
        return [end - begin for begin, end in self.spans]

    @property
    def by_expert(self) -> list[list[slice]]:
        """The blocks of each expert."""
        step = self.block_rows
        return [
            [slice(first, min(first + step, end)) for first in range(begin, end, step)]
            for begin, end in self.spans
        ]

    def scratch(self, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """For one block of any expert."""
        rows = max((end - begin for begin, end in self.spans), default=0)
        return like.new_empty((min(rows, self.block_rows), width), dtype=dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, wide: Tensor) -> Tensor:
        """``x @ weight.T + bias`` in ``acc``: in ``out``, or in ``wide`` from the product there."""
        if self.dtype == self.acc:
            return torch.addmm(bias, x, weight.t(), out=out)
        return wide.copy_(torch.mm(x, weight.t(), out=out)).add_(bias)

    def activate(self, z: Tensor, out: Tensor) -> Tensor:
        """activation(z) in ``out``, which may be z."""
        if self.activation == "gelu":
            return _aten.gelu.out(z, out=out)
        return ACTIVATIONS[self.activation][0](out.copy_(z))

    def d_activate(self, d_a: Tensor, z: Tensor) -> Tensor:
        """d_a * activation'(z), in place of d_a; z stays as it is."""
        if self.activation == "gelu":
            return _aten.gelu_backward.grad_input(d_a, z, grad_input=d_a)
        return d_a.copy_(ACTIVATIONS[self.activation][1](d_a, z.clone()))

    def masks(self, block: slice, *likes: Tensor) -> list[Tensor | None]:
        """For the hidden values and the output of a block: 0 or 1 / (1 - p), None if p is 0."""
        if not any(self.dropout_p):
            return [None, None]
        generator = torch.Generator().manual_seed(self.seed + block.start)
        found: list[Tensor | None] = []
        for like, p in zip(likes, self.dropout_p, strict=True):
            keep = torch.empty_like(like, dtype=self.acc) if p > 0 else None
            if keep is not None:
                keep.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
            found.append(keep)
        return found


def whole_parts(
    by_expert: Sequence[Sequence[_Block]], sizes: Sequence[int], model_dim: int
) -> list[tuple[int, Sequence[_Block]]]:
    """(expert, consecutive blocks of its rows) for a thread each, an expert's together if it is not
    overloaded.

    Args:
        by_expert: blocks of each.
        sizes: rows of each.
    """
    share = max(1.0, sum(sizes) / torch.get_num_threads())
    uneven = max(sizes, default=0) > _UNEVEN * share
    parts = []
    for expert, (size, blocks) in enumerate(zip(sizes, by_expert, strict=True)):
        if not blocks:
            continue
        # a part's own weight gradients, 2 M F numbers, are not to exceed its hidden values
        most = min(math.ceil(size / share), size // (2 * model_dim)) if uneven else 1
        step = math.ceil(len(blocks) / max(1, most))
        parts += [(expert, blocks[i : i + step]) for i in range(0, len(blocks), step)]
    return parts


class GradientSums:
    """Gradients of the experts' parameters, added up block by block, by several threads at once.

    Args:
        params: fc1_weight, fc1_bias, fc2_weight, fc2_bias; (e, ...) each.
        parts: of :meth:`Blocks.parts`. A part adds up in its expert's own gradients, or, after an
            expert's first part, apart, to be added by :meth:`totals` in order.
        acc: dtype of the sums of biases; those of weights have the weights', unless ``wide``.
    """

    def __init__(self, params: Sequence[Tensor], parts: list, acc, wide: bool = False):
        self._params = params
        self._totals = [
            p.new_empty(p.shape, dtype=acc if wide else p.dtype)
            if p.dim() == 3
            else p.new_zeros(p.shape, dtype=acc)
            for p in params
        ]
        self.of_part: list[list[Tensor]] = []
        self._later: list[tuple[int, list[Tensor]]] = []
        seen = set()
        for expert, _ in parts:
            sums = [total[expert] for total in self._totals]
            if expert in seen:
                # weights are overwritten by the first block, biases are added to
                sums = [torch.empty_like(s) if s.dim() == 2 else torch.zeros_like(s) for s in sums]
                self._later.append((expert, sums))
            self.of_part.append(sums)
            seen.add(expert)
        for expert in set(range(len(self._totals[0]))) - seen:
            for total in self._totals:
                total[expert] = 0

    def totals(self) -> tuple[Tensor, ...]:
        """The gradients, after all parts, in the dtypes of the parameters."""
        for expert, values in self._later:
            for total, value in zip(self._totals, values, strict=True):
                total[expert] += value
        return tuple(t.to(p.dtype) for t, p in zip(self._totals, self._params, strict=True))


def accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b for the first block of a part, total += a @ b for the next ones."""
    if total.dtype != a.dtype:
        total.copy_(a @ b) if first else total.add_(a @ b)
    elif first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)
