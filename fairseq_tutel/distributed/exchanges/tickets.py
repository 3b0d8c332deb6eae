"""Exchanges that are started now and waited for later, so that experts compute meanwhile.

``start`` queues an exchange on a lane and returns a ticket; ``ticket.wait()`` returns what arrived.
Both are differentiable: the gradient is sent where the forward pass waited, and waited for where it
started, so that the backward pass overlaps as the forward pass does.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from ..lanes import Lane
from .base import Exchange, Leg, Parts


class Ticket:
    """An exchange on its way, to be waited for once; made by :func:`start`."""

    def __init__(self, exchange: Exchange, leg: Leg, parts: Parts | None, lane: Lane):
        self._exchange, self._leg, self._parts, self._lane = exchange, leg, parts, lane
        self._unfilled: torch.Tensor | None = None
        self._under_way: tuple | None = None

    def wait(self) -> torch.Tensor:
        """What arrived, [n', ...]; raises what the exchange raised.

        Raises:
            RuntimeError: it was waited for before.
        """
        if self._unfilled is None:
            raise RuntimeError(f"the {self._leg.value} exchange was waited for before")
        unfilled, self._unfilled = self._unfilled, None
        return _Wait.apply(unfilled, self)

    def _send(self, rows, leg):
        rows = rows.contiguous()
        received = self._exchange.receive_buffer(rows, leg, self._parts)

        def run():
            self._exchange.move(rows, received, leg, self._parts)

        # both tensors are kept: their memory must not be given to others while it is read or filled
        self._under_way = (self._lane.submit(run), rows, received)
        return received

    def _arrive(self):
        finish, *_ = self._under_way
        finish()
        self._under_way = None


def start(
    exchange: Exchange, rows: torch.Tensor, leg: Leg, parts: Parts | None, lane: Lane
) -> Ticket:
    """Queue one leg of an exchange; all ranks queue theirs in one order.

    NOTE: the memory is unfilled in between, which ``torch.autograd.set_detect_anomaly`` takes for
    NaN; do without tickets there.

    Args:
        exchange: any.
        rows: [n, ...]; not to be written to before the ticket has been waited for.
        leg: DISPATCH or COMBINE.
        parts: None for equal parts.
        lane: where it runs.
    """
    ticket = Ticket(exchange, leg, parts, lane)
    ticket._unfilled = _Start.apply(rows, ticket)
    return ticket


class _Start(torch.autograd.Function):
    """Returns memory that is filled later; its one consumer is _Wait."""

    @staticmethod
    def forward(ctx, rows, ticket):
        ctx.ticket = ticket
        return ticket._send(rows, ticket._leg)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.ticket._arrive()
        return grad, None


class _Wait(torch.autograd.Function):
    """The filled memory; its gradient sets out for the rank that the rows came from."""

    @staticmethod
    def forward(ctx, unfilled, ticket):
        ctx.ticket = ticket
        ticket._arrive()
        return unfilled.view_as(unfilled)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.ticket._send(grad, ctx.ticket._leg.gradient), None
