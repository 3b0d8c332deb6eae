"""Exchange of a layer: an algorithm with gradients, a wire format and timing.

``dispatch`` and ``combine`` block. ``start`` queues an exchange on a stream and returns a handle,
whose ``wait()`` returns the received rows; experts compute meanwhile. All are differentiable. The
backward pass starts an exchange where the forward pass waited, and waits where it started one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, final

import torch
from torch.autograd.function import once_differentiable

from .algorithm import Direction, ExchangeAlgorithm, Splits
from .streams import Stream


class Codec(Protocol):
    """Wire format of rows; no autograd, no state."""

    def encode(
        self, rows: torch.Tensor, direction: Direction
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Encode rows [n, ...]; return None if they travel unchanged in this direction.

        Returns:
            The message [n, ...], a row per row, so that splits stay valid; and fp32 [2], the sums
            of squared errors and of squares.
        """
        ...

    def decode(self, message: torch.Tensor, direction: Direction, out: torch.Tensor) -> None:
        """Decode a received message into ``out``."""


@dataclass
class ExchangeRecord:
    """Times and rounding errors of the exchanges in one call of a layer.

    Attributes:
        cpu_ms: wall time of timed exchanges, in milliseconds.
        cuda_ms: their time between events of a GPU, in milliseconds.
        square_sums: by direction, fp32 [2]: sums of squared errors and of squares, as
            :meth:`Codec.encode` returns them; of gradients after the backward pass.
        loads_P: with ``balance_ranks``, rows that each rank of the exchange group computes.
        rows_helped: rows of this rank's experts that other ranks compute.
        bytes_moved: weights of experts that this rank sent to helpers, and gradients of helped
            experts that it sent home.
    """

    cpu_ms: float = 0.0
    cuda_ms: float = 0.0
    square_sums: dict[Direction, torch.Tensor] = field(default_factory=dict)
    loads_P: list[int] = field(default_factory=list)
    rows_helped: int = 0
    bytes_moved: int = 0

    def add_square_sums(self, direction: Direction, sums: torch.Tensor) -> None:
        """Add the sums of one message."""
        before = self.square_sums.get(direction)
        self.square_sums[direction] = sums if before is None else before + sums

    @contextlib.contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Add the time of the block. Synchronises with the device before and after."""
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        yield
        if on_gpu:
            end.record()
            torch.cuda.synchronize()
            self.cuda_ms += begin.elapsed_time(end)
        self.cpu_ms += 1000 * (time.perf_counter() - start)


@final
class Exchange:
    """Exchange of token rows with the ranks of their experts.

    ``combine`` undoes ``dispatch``, and each is the gradient of the other. With one rank both
    return their input.

    Args:
        algorithm: the all-to-all.
        codec: the wire format (default None: rows travel unchanged).
        timed: measure forward calls that bring a record, for ``record_exchange_time`` (default
            False). It slows training down.
        balances: make a record for the moves of ``balance_ranks`` (default False).
    """

    def __init__(
        self,
        algorithm: ExchangeAlgorithm,
        codec: Codec | None = None,
        timed: bool = False,
        balances: bool = False,
    ):
        self.algorithm, self.codec, self.timed, self.balances = algorithm, codec, timed, balances
        self.groups = algorithm.groups

    @property
    def name(self) -> str:
        return self.algorithm.name

    def new_record(self) -> ExchangeRecord | None:
        """Return a record for one call of a layer; None if there is nothing to record."""
        measured = self.timed or self.balances or self.codec is not None
        return ExchangeRecord() if measured else None

    def dispatch(self, rows: torch.Tensor, splits=None, record=None) -> torch.Tensor:
        """Send rows to the ranks of their experts, [n, ...] -> [n', ...]. Differentiable.

        Args:
            rows: rows in the algorithm's ``send_order``.
            splits: one result of the algorithm's ``share_chunks``; None for equal parts.
            record: :class:`ExchangeRecord` for measurements; None records nothing.
        """
        return self.at_once(rows, Direction.DISPATCH, splits, record)

    def combine(self, rows: torch.Tensor, splits=None, record=None) -> torch.Tensor:
        """Send rows back to their source; ``splits`` and ``record`` are those of ``dispatch``."""
        return self.at_once(rows, Direction.COMBINE, splits, record)

    def start(
        self,
        rows: torch.Tensor,
        direction: Direction,
        splits: Splits | None,
        stream: Stream,
        record: ExchangeRecord | None = None,
        into: torch.Tensor | None = None,
    ) -> Handle:
        """Queue an exchange in one direction on a stream; all ranks queue in the same order.

        Args:
            rows: [n, ...]; do not write to them before the exchange is done.
            direction: DISPATCH or COMBINE, differentiable; without gradients any direction.
            splits, record: see :meth:`dispatch`.
            stream: stream of the exchange and of its gradient.
            into: [n', ...], memory for the received rows if gradients are disabled (default None:
                new memory).
        """
        handle = Handle(self, direction, splits, stream, record, into)
        handle._unfilled = _Start.apply(rows, handle)
        return handle

    def at_once(self, rows, direction: Direction, splits=None, record=None) -> torch.Tensor:
        """Run an exchange in one direction; differentiable for DISPATCH and COMBINE."""
        alone = self.groups.ep_size == 1
        if direction not in (Direction.DISPATCH, Direction.COMBINE):
            return rows if alone else self._run(rows, direction, splits, record)
        if not self.timed or record is None:
            return rows if alone else _AtOnce.apply(rows, self, direction, splits, record)
        with record.measure(rows.device):
            return rows if alone else _AtOnce.apply(rows, self, direction, splits, record)

    def _run(self, rows, direction, splits, record):
        message, arrived, received = self._prepare(rows, direction, splits, record)
        self.algorithm.move(message, arrived, direction, splits)
        self._decode(arrived, received, direction)
        return received

    def _prepare(self, rows, direction, splits, record, into=None):
        """Return (message to send, memory for the received message, memory for its rows)."""
        rows = rows.contiguous()
        received = _buffer(rows, direction, splits) if into is None else into
        encoded = None if self.codec is None else self.codec.encode(rows, direction)
        if encoded is None:
            return rows, received, received
        message, sums = encoded
        if record is not None:
            record.add_square_sums(direction, sums)
        return message, _buffer(message, direction, splits), received

    def _decode(self, arrived, received, direction):
        if self.codec is not None and arrived is not received:
            self.codec.decode(arrived, direction, received)


class Handle:
    """Handle of a queued exchange, from :meth:`Exchange.start`; wait for it once."""

    # (function that waits, memory to fill, memory that is read) of the running exchange
    _under_way: tuple[Callable[[], None], torch.Tensor, torch.Tensor] | None = None

    def __init__(self, exchange, direction, splits, stream, record, into):
        self._exchange, self._direction, self._splits = exchange, direction, splits
        self._stream, self._record, self._into = stream, record, into
        self._unfilled: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Return the received rows, [n', ...]. Differentiable. Raise the error of the exchange."""
        if self._unfilled is None:
            raise RuntimeError(f"the {self._direction.value} exchange was waited for before")
        unfilled, self._unfilled = self._unfilled, None
        return _Wait.apply(unfilled, self)

    def _send(self, rows, direction):
        exchange, splits = self._exchange, self._splits
        message, arrived, received = exchange._prepare(
            rows, direction, splits, self._record, self._into
        )
        move = exchange.algorithm.move
        wait = self._stream.submit(lambda: move(message, arrived, direction, splits))

        def finish():
            wait()
            exchange._decode(arrived, received, direction)

        self._under_way = (finish, received, message)
        return received

    def _arrive(self):
        """Wait for the exchange, and return the filled memory; None if nothing is under way."""
        if self._under_way is None:
            return None
        wait, received, _ = self._under_way
        wait()
        self._under_way = None
        return received

    def drain(self) -> None:
        """Wait until the exchange uses no memory any more, and drop its error."""
        with contextlib.suppress(Exception):
            self._arrive()


def _buffer(rows, direction, splits):
    """Return uninitialised memory for the rows that arrive in a direction."""
    size = rows.shape[0] if splits is None else sum(splits.sizes(direction.outward)[1])
    return rows.new_empty((size, *rows.shape[1:]))


class _AtOnce(torch.autograd.Function):
    """Exchange without overlap; its gradient is the exchange in the reverse direction."""

    @staticmethod
    def forward(ctx, rows, exchange, direction, splits, record):
        ctx.call = exchange, direction.gradient, splits, record
        return exchange._run(rows, direction, splits, record)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        exchange, *call = ctx.call
        return exchange._run(grad, *call), None, None, None, None


class _Start(torch.autograd.Function):
    """Start of an exchange: memory that is filled later. _Wait is its only consumer."""

    @staticmethod
    def forward(ctx, rows, handle):
        ctx.handle = handle
        return handle._send(rows, handle._direction)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.handle._arrive(), None


class _Wait(torch.autograd.Function):
    """End of an exchange: the filled memory. Its backward pass starts the gradient's exchange.

    _Start ignores the returned gradient, which only has the shape that autograd requires.
    """

    @staticmethod
    def forward(ctx, unfilled, handle):
        ctx.handle = handle
        handle._arrive()
        ctx.mark_dirty(unfilled)
        return unfilled

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        handle = ctx.handle
        handle._send(grad, handle._direction.gradient)
        return grad, None
