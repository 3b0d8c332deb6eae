"""Links on which rows travel between ranks, and the pipeline that computes meanwhile."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..distributed import Direction, Exchange, ExchangeRecord
from ..distributed.exchanges import Stream
from .chunks import Chunk


class Link(NamedTuple):
    """Exchange on one stream, or at once without a stream."""

    exchange: Exchange
    stream: Stream | None
    record: ExchangeRecord | None

    def start(self, rows, direction, chunk, into=None):
        """Start an exchange, differentiable without ``into``, and return its handle.

        It is done at once on one rank, without a stream, and if it is measured.
        """
        exchange, forward = self.exchange, direction in (Direction.DISPATCH, Direction.COMBINE)
        if exchange.groups.ep_size == 1 and not exchange.timed:
            return _Arrived(rows if into is None else into.copy_(rows))
        measured = exchange.timed and self.record is not None and forward
        if self.stream is not None and not measured:
            return exchange.start(rows, direction, chunk.splits, self.stream, self.record, into)
        arrived = exchange.at_once(rows, direction, chunk.splits, self.record)
        return _Arrived(arrived if into is None else into.copy_(arrived))

    def plain(self) -> "Link":
        """Return a link without a wire format and without measurements."""
        return Link(Exchange(self.exchange.algorithm), self.stream, None)


class _Arrived(NamedTuple):
    """Rows of an exchange that is done, as a handle."""

    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.rows

    def drain(self) -> None:
        pass


def pipeline(
    chunks: Sequence[Chunk],
    send: Callable[[Chunk], Iterable[Any]],
    compute: Callable[..., tuple[Sequence[Any], Any]],
    send_back: Callable[..., Iterable[Any]],
    meanwhile: Callable[[list[Any]], Any] | None = None,
) -> tuple[list[torch.Tensor], list[Any], Any]:
    """Send all chunks, compute each one that has arrived, and send its results back.

    If the computation fails, its error is raised after the exchanges under way are done, because
    they write into its memory. If an exchange fails, its error is raised at once: the exchanges
    behind it may never end.

    ``send`` and ``send_back`` start exchanges and return their handles. ``compute`` maps a chunk
    and the arrived tensors to tensors to send back and to a state. ``meanwhile`` maps all states to
    a result while the last tensors travel. Return the tensors that came back, states, and result.
    """
    going = [list(send(chunk)) for chunk in chunks]
    coming, kept, last = [], [], None
    for chunk in chunks:
        arrived = [handle.wait() for handle in going.pop(0)]
        with _drained_if_it_fails(coming, *going):
            results, state = compute(chunk, *arrived)
        kept.append(state)
        coming += send_back(chunk, *results)
    if meanwhile is not None:
        with _drained_if_it_fails(coming):
            last = meanwhile(kept)
    return [handle.wait() for handle in coming], kept, last


@contextlib.contextmanager
def _drained_if_it_fails(*under_way: Iterable[Any]):
    try:
        yield
    except Exception:
        for handle in itertools.chain(*under_way):
            handle.drain()
        raise
