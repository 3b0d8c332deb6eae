"""Overlap exchanges and experts: rows travel in chunks while other chunks are computed.

Tutel's adaptive pipelining (Hwang et al., arXiv 2206.03382, section 3.2). D: exchange to the
experts, C: exchange back, F: experts; > start, . wait; the number is that of the chunk::

    forward    >D0 >D1 .. >Dn | .D0 F0 >C0 | .D1 F1 >C1 | .. | .C0 .C1 .. .Cn
    backward   >Cn .. >C0 | .Cn Fn >Dn | .. | .C0 F0 >D0 | weights | .Dn .. .D0

The backward pass mirrors the forward pass on every rank, so that collectives have one order. Weight
gradients are computed once over all chunks, while the last gradients travel.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..distributed import Direction, Exchange, ExchangeRecord
from ..distributed.exchanges import Stream, stream_of
from .chunks import Chunk
from .experts import ExpertBank, ExpertRows, PreparedExperts
from .torch_modes import untraced


@untraced  # a trace sees neither threads nor CUDA streams
def overlapped(
    rows_RM: torch.Tensor,
    chunks: Sequence[Chunk],
    experts: ExpertBank,
    exchange: Exchange,
    prepared: PreparedExperts | None,
    record: ExchangeRecord | None,
) -> torch.Tensor:
    """Send the rows [R, M] to the experts and return the experts' outputs. Differentiable.

    All ranks have the same number of chunks, at least two. Banks without ``computes_chunks`` add
    weight gradients chunk by chunk.
    """
    link = Link(exchange, stream_of(rows_RM.device), record)
    # a wrapped bank is called, so that its wrapper sees the call
    in_chunks = isinstance(experts, ExpertBank) and experts.computes_chunks
    if in_chunks and prepared is None:
        prepared = experts.prepare(rows_RM.dtype)
    if not in_chunks or prepared is None:
        return _through_any(rows_RM, chunks, experts, prepared, link)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (rows_RM, *prepared.params))
    run = experts, prepared._replace(params=()), chunks, link
    return _ThroughBank.apply(rows_RM, run, keep, *prepared.params)


class Link(NamedTuple):
    """Exchange on one stream."""

    exchange: Exchange
    stream: Stream
    record: ExchangeRecord | None

    def start(self, rows, direction, chunk, into=None):
        """Start an exchange and return its handle; a measured one is done at once."""
        exchange, forward = self.exchange, direction in (Direction.DISPATCH, Direction.COMBINE)
        measured = exchange.timed and self.record is not None and forward
        if exchange.groups.ep_size > 1 and not measured:
            return exchange.start(rows, direction, chunk.splits, self.stream, self.record, into)
        move = exchange.dispatch if direction is Direction.DISPATCH else exchange.combine
        arrived = move(rows, chunk.splits, self.record) if measured else rows
        return _Arrived(arrived if into is None else into.copy_(arrived))


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


def _through_any(rows_RM, chunks, experts, prepared, link):
    """Call the experts per chunk; autograd reverses the order: it runs the latest node first."""
    parts = iter(rows_RM.split([chunk.span.stop - chunk.span.start for chunk in chunks]))

    def compute(chunk, rows):
        out = experts(ExpertRows(chunk.by_expert(rows), chunk.offsets), prepared)
        return [chunk.by_rank(out)], None

    out, _, _ = pipeline(
        chunks,
        lambda chunk: [link.start(next(parts), Direction.DISPATCH, chunk)],
        compute,
        lambda chunk, out: [link.start(out, Direction.COMBINE, chunk)],
    )
    return torch.cat(out)


class _ThroughBank(torch.autograd.Function):
    """Exchanges and a bank that computes weight gradients once over all chunks."""

    @staticmethod
    def forward(ctx, rows_RM, run, keep, *params):
        bank, prepared, chunks, link = ctx.run = run
        prepared = prepared._replace(params=params)
        out_RM = torch.empty_like(rows_RM)

        def compute(chunk, rows):
            out, state = bank.chunk(prepared, chunk.by_expert(rows), chunk.offsets, keep)
            return [chunk.by_rank(out)], state if keep else ()

        _, states, _ = pipeline(
            chunks,
            lambda chunk: [link.start(rows_RM[chunk.span], Direction.DISPATCH, chunk)],
            compute,
            lambda chunk, out: [link.start(out, Direction.COMBINE, chunk, out_RM[chunk.span])],
        )
        ctx.save_for_backward(*params, *itertools.chain(*states))
        return out_RM

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_RM):
        bank, prepared, chunks, link = ctx.run
        needs_rows, _, _, *needs = ctx.needs_input_grad
        tensors = ctx.saved_tensors  # read once: a recomputed tensor is handed out once
        prepared = prepared._replace(params=tensors[: len(needs)])
        states = split_states(tensors[len(needs) :], len(chunks))
        later, d_out_RM = iter(states[::-1]), d_out_RM.contiguous()
        d_rows_RM = torch.empty_like(d_out_RM) if needs_rows else None

        def compute(chunk, d_out):
            d_out, state = chunk.by_expert(d_out), next(later)
            d_rows, gradient = bank.chunk_bwd(prepared, d_out, state, needs_rows)
            return [chunk.by_rank(d_rows) if needs_rows else None], gradient

        def send_back(chunk, d_rows):
            if d_rows_RM is not None:
                into = d_rows_RM[chunk.span]
                yield link.start(d_rows, Direction.DISPATCH_GRADIENT, chunk, into)

        def params_bwd(gradients):
            return bank.chunks_bwd_params(prepared, states, gradients[::-1])

        _, _, d_params = pipeline(
            chunks[::-1],
            lambda chunk: [link.start(d_out_RM[chunk.span], Direction.COMBINE_GRADIENT, chunk)],
            compute,
            send_back,
            params_bwd if any(needs) else None,
        )
        return d_rows_RM, None, None, *needed_gradients(d_params, needs)


def split_states(saved: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Return what each of ``count`` chunks saved, equally many tensors."""
    size = len(saved) // count
    return [saved[i * size : (i + 1) * size] for i in range(count)]


def needed_gradients(grads: Sequence[Any] | None, needs: Sequence[bool]) -> list[Any]:
    """Return the gradients, None for those that are not needed."""
    return [g if n else None for g, n in zip(grads or [None] * len(needs), needs, strict=True)]
