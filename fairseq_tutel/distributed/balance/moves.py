"""Send the weights of helped experts to their helpers, and the gradients back.

Both exchanges run while each rank computes its own rows::

    forward     > weights | own rows | . weights | helped rows
    backward    helped rows | > gradients | own rows | . gradients

(> start, . wait). The weights of an expert are one row. An expert's home adds the helpers'
gradients to its own in the order of their ranks, so results do not depend on timing.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from ..exchanges import Direction, Exchange, ExchangeRecord, Splits, Stream
from .plan import Move


class WeightMoves:
    """Exchanges of one step for one set of stacked weights: :meth:`start`, then :meth:`wait`.

    ``moves`` are those of the whole plan, equal on all ranks. ``exchange`` has no wire format.
    Between start and wait the caller's thread runs no collective of the exchange group. ``record``
    counts the bytes that this rank sends, and that it will send in the backward pass.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        exchange: Exchange,
        stream: Stream,
        record: ExchangeRecord | None = None,
    ):
        self._exchange, self._stream, self._record = exchange, stream, record
        me, local = exchange.groups.ep_rank, exchange.groups.num_local_experts
        sent = sorted((m.helper, m.expert) for m in moves if m.home == me)
        #: experts that this rank helps, in the order of their numbers
        self.helped = sorted(m.expert for m in moves if m.helper == me)
        self._slots = [expert - me * local for _, expert in sent]
        ranks = range(exchange.groups.ep_size)
        self._splits = Splits(
            [sum(helper == rank for helper, _ in sent) for rank in ranks],
            [sum(expert // local == rank for expert in self.helped) for rank in ranks],
        )

    def start(self, params: Sequence[torch.Tensor]) -> None:
        """Start to send the weights of helped experts, [e * n, ...]. Differentiable; collective."""
        experts = self._exchange.groups.num_local_experts
        parts = [param.reshape(experts, -1)[self._slots] for param in params]
        self._like = [
            (part.shape[1], param.shape[1:]) for part, param in zip(parts, params, strict=True)
        ]
        rows = torch.cat(parts, 1)
        if self._record is not None:
            returned = len(self.helped) if rows.requires_grad else 0
            row_bytes = rows.shape[1] * rows.element_size()
            self._record.bytes_moved += (len(rows) + returned) * row_bytes
        self._handle = self._exchange.start(rows, Direction.DISPATCH, self._splits, self._stream)

    def wait(self, out: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Wait for the weights. Differentiable.

        ``out`` are outputs of the rank's own rows. Return them, and the parameters [h * n, ...] of
        the h experts that this rank helps.
        """
        out, rows = _Together.apply(out, self._handle.wait())
        parts = rows.split([size for size, _ in self._like], dim=1)
        pairs = zip(parts, self._like, strict=True)
        return out, tuple(part.reshape(-1, *shape) for part, (_, shape) in pairs)

    def drain(self) -> None:
        """Wait until the exchange uses no memory any more, and drop its error."""
        self._handle.drain()


class _Together(torch.autograd.Function):
    """Outputs and weights as they are.

    The outputs pass through it, so that every rank sends gradients in the backward pass, and
    before it computes those of its own rows.
    """

    @staticmethod
    def forward(ctx, out, rows):
        return out.view_as(out), rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_rows):
        return d_out, d_rows
