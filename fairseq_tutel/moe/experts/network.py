"""The network that the experts of a bank have, as a value: what its parameters and rows become.

A bank prepares parameters and says by a network how :mod:`..network_pass` computes with them. A
bank whose network is None is called instead, and autograd follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ... import ops
from ..torch_modes import untraced, without_autocast


@dataclass(frozen=True)
class FusedNetwork:
    """``fc2(dropout(activation(fc1(x))))`` with dropout after it, by the fused operators.

    Its parameters are stacked: fc1's weight and bias and fc2's, without biases that the network
    does not have. ``parts`` projections are neighbours in fc1, [e*n, F, M].
    """

    options: ops.FFNOptions
    parts: int = 1
    has_bias: bool = True

    #: whether one operator computes dispatch, network and combine on one rank
    is_operator = True

    def operands(self, params: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the weight and bias of fc1 and of fc2, as the operators take them."""
        if self.has_bias:
            w1, b1, w2, b2 = params
            return self._joined(w1), self._joined(b1), w2, b2
        w1, w2 = params
        return self._joined(w1), None, w2, None

    def _joined(self, fc1: Tensor) -> Tensor:
        if self.parts == 1:
            return fc1
        stacked, hidden_dim, *inputs = fc1.shape
        return fc1.reshape(stacked // self.parts, self.parts * hidden_dim, *inputs)

    def forward(
        self, rows: ops.Source, params: Sequence[Tensor], memory: ops.ActivationMemory | None
    ) -> tuple[Tensor, ops.Saved]:
        """Return the outputs of a chunk of rows, and what ``memory`` keeps; None: nothing."""
        seed = self.options.draw_seed(rows.values.device)
        return ops.network_fwd(rows, self.operands(params), self.options, memory, seed)

    def backward(
        self,
        d_out: ops.Source,
        rows: ops.Source,
        weight_R: Tensor | None,
        saved: Sequence[Any],
        params: Sequence[Tensor],
        needs: Mapping[str, bool],
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Return the gradients of a chunk's rows and weights, and what the parameters' need.

        ``weight_R`` are the rows' weights if outputs are not kept. An only chunk may be ``at_once``
        (:func:`ops.network_bwd`).
        """
        chunk = ops.Saved(*saved), self.operands(params), self.options
        return ops.network_bwd(d_out, rows, weight_R, *chunk, **needs)

    def backward_params(
        self, chunks: Sequence[Any], params: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of the parameters over all chunks, from :meth:`backward`."""
        found: Any
        if isinstance(chunks[0], ops.Pending):
            found = ops.network_bwd_params(chunks, self.operands(params))
        else:
            (found,) = chunks
        there = found if self.has_bias else found[::2]
        return [d.view(param.shape) for d, param in zip(there, params, strict=True)]


def is_fused(bank: Any) -> bool:
    """Return whether a bank has a network of its own, so that it is not called."""
    make = getattr(bank, "make_network", None)
    return make is not None and make((0.0, 0.0), 0) is not None


def weight_products(chunk: ops.Pending) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return, for fc1 and for fc2, the output's gradients and the inputs of a chunk.

    A weight's gradient is the product of both over the rows of each expert.
    """
    d_fc1, rows = chunk.d_hidden, chunk.rows.values
    lead = rows.shape[:-1]
    pairs = (d_fc1, rows), (chunk.d_out, chunk.active)
    fc1, fc2 = ((d.reshape(*lead, d.shape[-1]), x.reshape(*lead, x.shape[-1])) for d, x in pairs)
    return fc1, fc2


@untraced  # its functions are no operators that a trace could hold
def apply_network(
    network: Any, params: Sequence[Tensor], rows: Tensor, offsets: Tensor | None
) -> Tensor:
    """Compute a network on rows that a bank is called with; differentiable."""
    return _OnRows.apply(rows, offsets, network, *params)


class _OnRows(torch.autograd.Function):
    """One chunk of a network without dispatch and combine."""

    @staticmethod
    def forward(ctx, rows, offsets, network, *params):
        ctx.set_materialize_grads(False)
        ctx.network, ctx.offsets = network, offsets
        with without_autocast(rows.device):
            out, saved = network.forward(ops.Source(rows, offsets), params, ops.ActivationMemory())
        ctx.save_for_backward(rows, *saved, *params)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        needs_rows, _, _, *needs = ctx.needs_input_grad
        if d_out is None:
            return (None,) * (3 + len(needs))
        tensors = ctx.saved_tensors  # read once: a recomputed tensor is handed out once
        params = tensors[len(tensors) - len(needs) :]
        rows, *saved = tensors[: len(tensors) - len(needs)]
        sources = (ops.Source(each, ctx.offsets) for each in (d_out.contiguous(), rows))
        asked = {"needs_rows": needs_rows, "needs_params": any(needs)}
        with without_autocast(rows.device):
            d_rows, _, pending = ctx.network.backward(*sources, None, saved, params, asked)
            grads = ctx.network.backward_params([pending], params) if any(needs) else needs
        found = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
        return d_rows if needs_rows else None, None, None, *found
