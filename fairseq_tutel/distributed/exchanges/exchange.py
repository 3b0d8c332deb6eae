"""What layers exchange rows with: an algorithm, with gradients, a wire format and times.

``dispatch`` and ``combine`` exchange at once. ``start`` queues an exchange on a stream and returns
a handle, whose ``wait()`` returns what arrived, so that experts compute meanwhile. All are
differentiable: the gradient is sent where the forward pass waited, and waited for where it started,
so that the backward pass overlaps as the forward pass does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, final

import torch
from torch.autograd.function import once_differentiable

from .algorithm import Direction, ExchangeAlgorithm, Splits
from .streams import Stream


class Codec(Protocol):
    """How rows are written while they travel; no autograd, no state."""

    def encode(
        self, rows: torch.Tensor, direction: Direction
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None where rows travel as they are; else a message and what it has lost.

        Returns:
            message [n, ...] for rows [n, ...]: as many, so that splits stay as they are; fp32 [2],
            the sums of squared errors and of squares.
        """

    def decode(self, message: torch.Tensor, direction: Direction, out: torch.Tensor) -> None:
        """Fill rows from what arrived."""


@dataclass
class ExchangeRecord:
    """What the exchanges of one call of a layer tell besides the rows; the caller makes one."""

    cpu_ms: float = 0.0  # of a timed dispatch and combine: wall time,
    cuda_ms: float = 0.0  # and between events of a GPU
    # fp32 [2], sums of :meth:`Codec.encode`; of gradients after the backward pass
    square_sums: dict[Direction, torch.Tensor] = field(default_factory=dict)

    def add_square_sums(self, direction: Direction, sums: torch.Tensor) -> None:
        """Add those of one message."""
        before = self.square_sums.get(direction)
        self.square_sums[direction] = sums if before is None else before + sums

    @contextlib.contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Add the time of the block. NOTE: it synchronises with the device before and after."""
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
    """Moves the rows of tokens to the ranks of their experts and back.

    ``combine`` undoes ``dispatch``, and each is the gradient of the other.

    Args:
        algorithm: how rows travel. With one rank they stay where they are, uncopied.
        codec: how they are written while they travel; None: as they are.
        timed: whether calls that bring a record are measured, without their gradients, for
            ``--record-a2a-perf-stats``. It slows training down.
    """

    def __init__(
        self, algorithm: ExchangeAlgorithm, codec: Codec | None = None, timed: bool = False
    ):
        self.algorithm, self.codec, self.timed = algorithm, codec, timed
        self.groups = algorithm.groups

    @property
    def name(self) -> str:
        return self.algorithm.name

    def new_record(self) -> ExchangeRecord | None:
        """For the exchanges of one call; None where there is nothing to record."""
        return ExchangeRecord() if self.timed or self.codec is not None else None

    def dispatch(self, rows: torch.Tensor, splits=None, record=None) -> torch.Tensor:
        """Rows to the ranks of their experts, [n, ...] -> [n', ...]. Differentiable.

        Args:
            rows: in the ``send_order`` of the algorithm.
            splits: from its ``share_chunks``; None for equal parts.
            record: :class:`ExchangeRecord` that takes what is measured.
        """
        return self._at_once(rows, Direction.DISPATCH, splits, record)

    def combine(self, rows: torch.Tensor, splits=None, record=None) -> torch.Tensor:
        """Rows back to where ``dispatch`` (with the same splits) took them from."""
        return self._at_once(rows, Direction.COMBINE, splits, record)

    def start(
        self,
        rows: torch.Tensor,
        direction: Direction,
        splits: Splits | None,
        stream: Stream,
        record: ExchangeRecord | None = None,
        into: torch.Tensor | None = None,
    ) -> Handle:
        """Queue one direction; all ranks queue theirs in one order.

        Args:
            rows: [n, ...]; not to be written to before they arrived.
            direction: DISPATCH or COMBINE, differentiable; without gradients any of the four.
            splits, record: as of :meth:`dispatch`.
            stream: where it runs, as do the gradients.
            into: [n', ...], memory for what arrives, where gradients are not enabled.
        """
        handle = Handle(self, direction, splits, stream, record, into)
        handle._unfilled = _Start.apply(rows, handle)
        return handle

    def _at_once(self, rows, direction, splits, record):
        here = self.groups.ep_size == 1
        timed = self.timed and record is not None
        if here and not timed:
            return rows
        with record.measure(rows.device) if timed else contextlib.nullcontext():
            return rows if here else _AtOnce.apply(rows, self, direction, splits, record)

    def _run(self, rows, direction, splits, record):
        message, arrived, received = self._prepare(rows, direction, splits, record)
        self.algorithm.move(message, arrived, direction, splits)
        self._decode(arrived, received, direction)
        return received

    def _prepare(self, rows, direction, splits, record, into=None):
        """(what to send, memory for what comes, memory for the rows in it)"""
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
        if arrived is not received:
            self.codec.decode(arrived, direction, received)


class Handle:
    """Rows on their way, to be waited for once; made by :meth:`Exchange.start`."""

    def __init__(self, exchange, direction, splits, stream, record, into):
        self._exchange, self._direction, self._splits = exchange, direction, splits
        self._stream, self._record, self._into = stream, record, into
        self._unfilled: torch.Tensor | None = None
        # of what is on its way: a function that waits, memory to fill, memory that is read
        self._under_way: tuple | None = None

    def wait(self) -> torch.Tensor:
        """What arrived, [n', ...]; raises what the exchange raised, RuntimeError a second time."""
        if self._unfilled is None:
            raise RuntimeError(f"the {self._direction.value} exchange was waited for before")
        unfilled, self._unfilled = self._unfilled, None
        return _Wait.apply(unfilled, self)

    def drain(self) -> None:
        """Wait until nothing is read or filled any more, raise nothing; for one who gives up."""
        with contextlib.suppress(Exception):
            self._arrive()

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
        if self._under_way is None:
            return None
        finish, received, _ = self._under_way
        finish()
        self._under_way = None
        return received


def _buffer(rows, direction, splits):
    """Uninitialised memory for what a direction brings."""
    size = rows.shape[0] if splits is None else sum(splits.sizes(direction.outward)[1])
    return rows.new_empty((size, *rows.shape[1:]))


class _AtOnce(torch.autograd.Function):
    """One node for what need not overlap; the gradient is the exchange the other way."""

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
    """Returns memory that is filled later; its one consumer is _Wait."""

    @staticmethod
    def forward(ctx, rows, handle):
        ctx.handle = handle
        return handle._send(rows, handle._direction)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.handle._arrive(), None


class _Wait(torch.autograd.Function):
    """The filled memory; its gradient sets out for the rank that the rows came from.

    What its backward pass returns is not looked at, but has the shape that autograd asks for.
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
