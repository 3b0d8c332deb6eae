"""The network that the experts of a bank have, as a value: what its parameters and rows become.

A bank prepares parameters and says by a network how :mod:`..network_pass` computes with them. A
bank whose network is None is called instead, and autograd follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ... import ops


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
