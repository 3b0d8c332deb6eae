"""Exchanges that are started now and waited for later, so that experts compute meanwhile.

``start`` queues an exchange on a lane and returns a ticket; ``ticket.wait()`` returns what arrived.
Both are differentiable: the gradient is sent where the forward pass waited, and waited for where it
started, so that the backward pass overlaps as the forward pass does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from ..lanes import Lane
from .base import Exchange, Leg, Parts


class Flight:
    """One leg of an exchange on its way, without autograd; made by :func:`send`."""

    def __init__(self, finish: Callable[[], None], received: torch.Tensor, *kept: torch.Tensor):
        self.received = received
        # memory that must not be given to others while it is read or filled
        self._under_way: tuple | None = (finish, kept)

    def arrive(self) -> torch.Tensor:
        """What arrived, [n', ...]; raises what the exchange raised. To be called once."""
        finish, _ = self._under_way
        finish()
        self._under_way = None
        return self.received

    def land(self) -> None:
        """Wait until nothing is read or filled any more, if it is under way; for one who gives up.

        What arrived is not looked at, and raises nothing.
        """
        if self._under_way is not None:
            with contextlib.suppress(Exception):
                self.arrive()


def send(
    exchange: Exchange,
    rows: torch.Tensor,
    leg: Leg,
    parts: Parts | None,
    lane: Lane,
    into: torch.Tensor | None = None,
) -> Flight:
    """Queue one leg; all ranks queue theirs in one order.

    Args:
        exchange: any.
        rows: [n, ...]; not to be written to before they arrived.
        leg: any of the four.
        parts: None for equal parts.
        lane: where it runs.
        into: [n', ...], memory for what arrives; else it is allocated.
    """
    rows = rows.contiguous()
    received = exchange.receive_buffer(rows, leg, parts) if into is None else into
    codec = exchange.codec(leg, rows.dtype)
    if codec is None:
        finish = lane.submit(lambda: exchange.move(rows, received, leg, parts))
        return Flight(finish, received, rows)
    message = codec.encode(rows)
    arrived = exchange.receive_buffer(message, leg, parts)
    wait = lane.submit(lambda: exchange.move(message, arrived, leg, parts))

    def wait_and_decode():
        wait()
        codec.decode(arrived, received)

    return Flight(wait_and_decode, received, message, arrived)


class Ticket:
    """An exchange on its way, to be waited for once; made by :func:`start`."""

    def __init__(self, exchange: Exchange, leg: Leg, parts: Parts | None, lane: Lane):
        self._exchange, self._leg, self._parts, self._lane = exchange, leg, parts, lane
        self._unfilled: torch.Tensor | None = None
        self._flight: Flight | None = None

    def wait(self) -> torch.Tensor:
        """What arrived, [n', ...]; raises what the exchange raised.

        Raises:
            RuntimeError: it was waited for before.
        """
        if self._unfilled is None:
            raise RuntimeError(f"the {self._leg.value} exchange was waited for before")
        unfilled, self._unfilled = self._unfilled, None
        return _Wait.apply(unfilled, self)

    def land(self) -> None:
        """:meth:`Flight.land` of what is under way now, there or back."""
        if self._flight is not None:
            self._flight.land()

    def _send(self, rows, leg):
        self._flight = send(self._exchange, rows, leg, self._parts, self._lane)
        return self._flight.received

    def _arrive(self):
        flight, self._flight = self._flight, None
        return flight.arrive()


def start(
    exchange: Exchange, rows: torch.Tensor, leg: Leg, parts: Parts | None, lane: Lane
) -> Ticket:
    """:func:`send`, differentiable, for the legs DISPATCH and COMBINE."""
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
        return ctx.ticket._arrive(), None


class _Wait(torch.autograd.Function):
    """The filled memory; its gradient sets out for the rank that the rows came from.

    What it returns is not looked at, but of the shape that autograd asks for: as many rows arrive
    as had been sent, not as had been received.
    """

    @staticmethod
    def forward(ctx, unfilled, ticket):
        ctx.ticket = ticket
        ticket._arrive()
        return unfilled.view_as(unfilled)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.ticket._send(grad, ctx.ticket._leg.gradient)
        return grad, None
