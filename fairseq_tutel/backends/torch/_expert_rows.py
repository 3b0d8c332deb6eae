"""The experts' network, forward and backward, on a group of experts with their own rows.

A group is one expert, or some with few and equally many rows, whose products are one batch: two
threads then take an expert each in place of half a product. Rows of one expert are computed in
parts that fit into the cache, so that the activation finds there what the product before it left.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import GATES
from .._fp8 import rounded_rows
from .activation import ACTIVATIONS, acc_dtype

# Hidden values of a group or part, 8 MiB of fp32, and rows that keep products efficient.
_PART_NUMEL = 1 << 21
_MIN_ROWS = 256


class Group(NamedTuple):
    """Successive experts with equally many rows, g x N of a buffer (R, M)."""

    experts: slice
    rows: slice

    def split(self, buffer_RA: Tensor) -> Tensor:
        """Return the group's rows of a buffer (R, ...), (g, N, ...)."""
        return self.shape(buffer_RA[self.rows])

    def shape(self, rows: Tensor) -> Tensor:
        """View the group's rows (g N, ...) as (g, N, ...)."""
        experts = self.experts.stop - self.experts.start
        count = (self.rows.stop - self.rows.start) // experts
        return rows.unflatten(0, (experts, count))


def groups_of(rows: Tensor, hidden_dim: int, offsets: Tensor | None) -> list[Group]:
    """Return the groups of all experts in their order; rows are (R, M) with ``offsets``."""
    if offsets is not None:
        ends = offsets.tolist()
        sides = enumerate(zip([0, *ends], ends, strict=False))
        return [Group(slice(x, x + 1), slice(begin, end)) for x, (begin, end) in sides]
    experts, capacity, _ = rows.shape
    size = max(1, _part_rows(hidden_dim) // max(1, capacity))
    bounds = [(x, min(x + size, experts)) for x in range(0, experts, size)]
    return [Group(slice(x, y), slice(x * capacity, y * capacity)) for x, y in bounds]


def _part_rows(hidden_dim: int) -> int:
    return max(_MIN_ROWS, _PART_NUMEL // max(1, hidden_dim))


def sum_rows(d_gNA: Tensor, d_bias_gA: Tensor) -> None:
    """Write the gradient of biases; shape (0,) wants none."""
    if d_bias_gA.numel() > 0:
        torch.sum(d_gNA, 1, dtype=d_bias_gA.dtype, out=d_bias_gA)


class Network:
    """The network that all experts have; see :func:`fairseq_tutel.ops.expert_ffn`.

    Products are rounded to ``dtype``, that of the rows. Everything else is computed in ``acc``,
    fp32 for halves. Parameters are fc1's weight and bias and fc2's; biases may be None.
    """

    def __init__(
        self,
        rows: Tensor,
        hidden_dim: int,
        *,
        activation: str,
        dropout_p: tuple[float, float] = (0.0, 0.0),
        seed: Tensor | None = None,
        fp8: bool = False,
    ):
        self.hidden_dim, self.dropout_p, self.fp8 = hidden_dim, dropout_p, fp8
        # p, values per hidden unit before the activation: gate and up, or one
        self.num_planes = 2 if activation in GATES else 1
        self.activation, self.activation_bwd = ACTIVATIONS[GATES.get(activation, activation)]
        self.seed = 0 if seed is None else int(seed)
        self.dtype, self.acc = rows.dtype, acc_dtype(rows.dtype)

    def planes(self, wide_RF: Tensor) -> Tensor:
        """View a buffer (R, p F) as p planes (p, R, F).

        Elementwise functions of torch take half the time on contiguous planes (silu and its
        gradient, 2048 x 680, 1 thread).
        """
        return wide_RF.view(self.num_planes, wide_RF.shape[0], self.hidden_dim)

    def forward(
        self,
        group: Group,
        params: Sequence[Tensor | None],
        rows_RM: Tensor,
        out_RM: Tensor,
        saved_pRF: Tensor | None,
        active_RF: Tensor | None,
    ) -> None:
        """Compute the output of a group's rows; keep fc1's products and fc2's input unless None."""
        w1, b1, w2, b2 = of_group(params, group)
        if self.fp8:
            w1, w2 = rounded_rows(w1), rounded_rows(w2)
        x_gNM, out_gNM = group.split(rows_RM), group.split(out_RM)
        for part in self._parts(x_gNM):
            x, out = x_gNM[:, part], out_gNM[:, part]
            if saved_pRF is None:
                buffers = self._buffers(x)
                active = buffers[0]
            else:
                buffers = [group.split(plane)[:, part] for plane in saved_pRF]
                if active_RF is None:
                    active = torch.empty_like(buffers[0])
                else:
                    active = group.split(active_RF)[:, part]
            z = self._first(x, w1, b1, buffers)
            keep_active, keep_out = self._masks(group.rows.start + part.start, out)
            self._activate(z, keep_active, active)
            y = self._linear(active, w2, b2, out)
            if keep_out is not None:
                y.mul_(keep_out)
            if y is not out:
                out.copy_(y)

    def backward(
        self,
        group: Group,
        params: Sequence[Tensor | None],
        x_gNM: Tensor | None,
        dy_gNM: Tensor,
        weighted: tuple[Tensor, Tensor] | None,
        saved_pRF: Tensor | None,
        active_gNF: Tensor,
        d_rows_gNM: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients of a group; write that of the rows unless ``d_rows_gNM`` is None.

        ``weighted`` is None if ``dy_gNM`` is the gradient of the outputs, and ``active_gNF`` was
        kept. Otherwise it is (weights, memory for their gradients), (g, N) each: ``dy_gNM`` is the
        gradient of the weighted outputs, and the activation is computed again into ``active_gNF``.
        ``saved_pRF`` are fc1's products; None to compute them again from the rows ``x_gNM``.

        Return the gradients of fc2's output before dropout, (g, N, M), and of fc1's, (g, N, p F).
        """
        w1, b1, w2, b2 = of_group(params, group)
        rounds = self.fp8 and saved_pRF is None
        w1_forward = rounded_rows(w1) if rounds else w1
        is_new = weighted is not None or self.dropout_p[1] > 0
        d_fc2 = torch.empty_like(dy_gNM) if is_new else dy_gNM
        d_fc1 = dy_gNM.new_empty((*dy_gNM.shape[:2], w1.shape[1]))
        for part in self._parts(dy_gNM):
            dy, d_z = dy_gNM[:, part], d_fc1[:, part]
            keep_active, keep_out = self._masks(group.rows.start + part.start, dy)
            if keep_out is not None:
                dy = (dy * keep_out).to(dy.dtype)
            if saved_pRF is None:
                assert x_gNM is not None
                z = self._first(x_gNM[:, part], w1_forward, b1, self._buffers(dy))
            else:
                z = self._saved(group, part, saved_pRF, b1)
            d_active = torch.bmm(dy, w2).to(self.acc)
            if keep_active is not None:
                d_active.mul_(keep_active)
            if weighted is None:
                self._activate_bwd(d_active, z, d_z)
                if is_new:
                    d_fc2[:, part] = dy
            else:
                weight, active = weighted[0][:, part, None], active_gNF[:, part]
                d_weight = self._activate_both(d_active, z, weight, active, d_z)
                if keep_active is not None:
                    active.copy_(active * keep_active)
                if b2 is not None:
                    d_weight += torch.bmm(dy, b2[:, :, None])[..., 0]
                weighted[1][:, part] = d_weight
                torch.mul(dy, weight, out=d_fc2[:, part])
            if d_rows_gNM is not None:
                torch.bmm(d_z, w1, out=d_rows_gNM[:, part])
        return d_fc2, d_fc1

    def bias_gradients(
        self, params: Sequence[Tensor | None], needed: bool = True
    ) -> Sequence[Tensor]:
        """Allocate the gradients of both biases in ``acc``; (0,) if not needed or no bias."""
        _, b1, w2, b2 = params
        shapes = (b.shape if needed and b is not None else (0,) for b in (b1, b2))
        return [w2.new_empty(shape, dtype=self.acc) for shape in shapes]

    def _parts(self, x_gNM: Tensor) -> Iterator[slice]:
        """Split N rows of one expert into equal parts, so that no small rest is left."""
        experts, size, _ = x_gNM.shape
        count = max(1, round(size / _part_rows(self.hidden_dim))) if experts == 1 else 1
        for part in range(count if size > 0 else 0):
            yield slice(size * part // count, size * (part + 1) // count)

    def _split(self, param: Tensor | None) -> Sequence[Tensor | None]:
        """Split fc1's weight (g, p F, M) or bias (g, p F) by plane."""
        if param is None:
            return self.num_planes * (None,)
        return param.unflatten(1, (self.num_planes, self.hidden_dim)).unbind(1)

    def _buffers(self, x: Tensor) -> Tensor:
        """Allocate fc1's products of a part's rows (g, N, M), a plane (g, N, F) for each."""
        return x.new_empty((self.num_planes, *x.shape[:2], self.hidden_dim))

    def _first(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, buffers: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return fc1's output in ``acc``, plane by plane; ``buffers`` hold the products."""
        sides = zip(self._split(w1), self._split(b1), buffers, strict=True)
        return [self._linear(x, weight, bias, buffer) for weight, bias, buffer in sides]

    def _saved(
        self, group: Group, part: slice, saved_pRF: Tensor, b1: Tensor | None
    ) -> list[Tensor]:
        """Return fc1's output in ``acc`` from the products that :meth:`forward` kept."""
        planes = zip(saved_pRF, self._split(b1), strict=True)
        return [self._widened(group.split(plane)[:, part], bias) for plane, bias in planes]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` in ``acc``; ``out`` holds the product, and is returned if
        the dtypes are equal.
        """
        if self.fp8:
            x = rounded_rows(x)
        if bias is None or self.dtype != self.acc:
            return self._widened(torch.bmm(x, weight.mT, out=out), bias)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT, out=out)

    def _widened(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """Return a product in ``acc``, with the bias that products of halves lack."""
        if self.dtype == self.acc:
            return product
        wide = product.to(self.acc)
        return wide if bias is None else wide.add_(bias.unsqueeze(1))

    def _activate(self, z: Sequence[Tensor], keep: Tensor | None, active: Tensor) -> None:
        """Write dropout(activation(z)), or dropout(activation(gate) * up) of two planes."""
        gate, *up = z
        wide = active if self.dtype == self.acc else gate
        self.activation(gate, wide)
        for factor in (*up, keep):
            if factor is not None:
                wide.mul_(factor)
        if wide is not active:
            active.copy_(wide)

    def _activate_bwd(self, d_active: Tensor, z: Sequence[Tensor], d_fc1: Tensor) -> None:
        """Write the gradient of z, (g, N, p F); overwrites ``d_active``.

        Planes lie side by side in it: one product each gives the gradients of rows and weight.
        """
        gate, *up = z
        if not up:
            d_fc1.copy_(self.activation_bwd(d_active, gate, d_active))
            return
        d_gate, d_up = d_fc1.chunk(2, -1)
        activated = self.activation(gate, torch.empty_like(gate))
        d_up.copy_(activated * d_active)
        d_gate.copy_(self.activation_bwd(d_active.mul_(up[0]), gate, activated))

    def _activate_both(
        self, d_active: Tensor, z: Sequence[Tensor], weight: Tensor, active: Tensor, d_fc1: Tensor
    ) -> Tensor:
        """Write the activation, and the gradient of z times the rows' weights, (g, N, p F).

        ``d_active`` is the gradient of the activation without the weights; it is overwritten.
        Return the gradient of the weights but for fc2's bias, (g, N).
        """
        gate, *up = z
        same_dtype = active.dtype == self.acc
        wide = active if same_dtype else torch.empty_like(gate)
        self.activation(gate, wide)
        if not up:
            d_z = d_fc1 if same_dtype else torch.empty_like(gate)
            d_weight = torch.mul(d_active, wide, out=d_z).sum(-1)
            self.activation_bwd(d_active.mul_(weight), gate, d_z)
            if d_z is not d_fc1:
                d_fc1.copy_(d_z)
        else:
            d_gate, d_up = d_fc1.chunk(2, -1)
            d_value = wide * d_active
            d_weight = (d_value * up[0]).sum(-1)
            d_up.copy_(d_value.mul_(weight))
            d_active.mul_(weight).mul_(up[0])
            d_gate.copy_(self.activation_bwd(d_active, gate, d_value))
            wide.mul_(up[0])
        if wide is not active:
            active.copy_(wide)
        return d_weight

    def _masks(self, seed: int, out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Draw masks for fc2's input and output, of 0 or 1 / (1 - p); None if p is 0.

        Each part has a generator of its own, so that the backward pass draws the same masks.
        """
        masks: list[Tensor | None] = [None, None]
        if any(self.dropout_p):
            generator = torch.Generator(out.device).manual_seed(self.seed + seed)
            for side, width in enumerate((self.hidden_dim, out.shape[-1])):
                p = self.dropout_p[side]
                if p > 0:
                    keep = out.new_empty((*out.shape[:2], width), dtype=self.acc)
                    masks[side] = keep.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
        return masks[0], masks[1]


def sum_weights(group: Group, values: Sequence[Any], d_weights: Sequence[Tensor]) -> None:
    """Write the gradients of a group's weights.

    One product over all rows of an expert is rounded once in half precision.
    """
    d_fc2, d_fc1, x, active = values
    d_w1, d_w2 = (d[group.experts] for d in d_weights)
    torch.bmm(d_fc2.mT, active, out=d_w2)
    torch.bmm(d_fc1.mT, x, out=d_w1)


def of_group(params: Sequence[Tensor | None], group: Group) -> list[Tensor | None]:
    """Return the parameters of a group's experts; biases may be None."""
    return [None if param is None else param[group.experts] for param in params]
