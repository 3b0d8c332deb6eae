"""Overlap exchanges and experts: rows travel in chunks while other chunks are computed.

Tutel's adaptive pipelining (Hwang et al., arXiv 2206.03382, section 3.2). D: exchange to the
experts, C: exchange back, F: experts; > start, . wait; the number is that of the chunk::

    forward    >D0 >D1 .. >Dn | .D0 F0 >C0 | .D1 F1 >C1 | .. | .C0 .C1 .. .Cn
    backward   >Cn .. >C0 | .Cn Fn >Dn | .. | .C0 F0 >D0 | weights | .Dn .. .D0

The backward pass mirrors the forward pass on every rank, so that collectives have one order. Weight
gradients are computed once over all chunks, while the last gradients travel: fewer roundings and
additions than per chunk.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..distributed import Direction, Exchange, ExchangeRecord
from ..distributed.exchanges import Stream, stream_of
from .experts import ExpertBank, ExpertRows, PreparedExperts
from .torch_modes import untraced

if TYPE_CHECKING:
    from .dispatcher import Chunk


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

    Chunks are neighbours in the rows and in the outputs. All ranks have equally many, at least two.
    Banks without ``computes_chunks`` add weight gradients chunk by chunk.
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
        return self.exchange.start(rows, direction, chunk.splits, self.stream, self.record, into)


def _through_any(rows_RM, chunks, experts, prepared, link):
    """Call the experts per chunk; autograd mirrors the order, as it runs the latest node first."""
    parts = rows_RM.split([chunk.span.stop - chunk.span.start for chunk in chunks])
    going = [
        link.start(rows, Direction.DISPATCH, chunk)
        for rows, chunk in zip(parts, chunks, strict=True)
    ]
    coming = []
    for chunk in chunks:
        rows = going.pop(0).wait()
        with drained_if_it_fails(going, coming):
            out = experts(ExpertRows(chunk.by_expert(rows), chunk.offsets), prepared)
            out = chunk.by_rank(out)
        coming.append(link.start(out, Direction.COMBINE, chunk))
    return torch.cat([handle.wait() for handle in coming])


class Drained(Protocol):
    """Exchange under way, or one that is done."""

    def drain(self) -> None: ...


@contextlib.contextmanager
def drained_if_it_fails(*under_way: Iterable[Drained]):
    """Let an error of the experts wait for the exchanges under way, which write into its memory.

    Not for use around waiting: behind a failed exchange others may wait for ever.
    """
    try:
        yield
    except Exception:
        for each in itertools.chain(*under_way):
            each.drain()
        raise


class _ThroughBank(torch.autograd.Function):
    """Exchanges and a bank that computes weight gradients once over all chunks."""

    @staticmethod
    def forward(ctx, rows_RM, run, keep, *params):
        bank, prepared, chunks, link = ctx.run = run
        prepared = prepared._replace(params=params)
        out_RM = torch.empty_like(rows_RM)
        going = [link.start(rows_RM[chunk.span], Direction.DISPATCH, chunk) for chunk in chunks]
        coming, saved = [], []
        for chunk in chunks:
            arrived = going.pop(0).wait()
            with drained_if_it_fails(going, coming):
                out, state = bank.chunk(prepared, chunk.by_expert(arrived), chunk.offsets, keep)
                out = chunk.by_rank(out)
            into = out_RM[chunk.span]
            coming.append(link.start(out, Direction.COMBINE, chunk, into))
            saved += state if keep else ()
        for handle in coming:
            handle.wait()
        ctx.save_for_backward(*params, *saved)
        return out_RM

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_RM):
        bank, prepared, chunks, link = ctx.run
        needs_rows, _, _, *needs = ctx.needs_input_grad
        tensors = ctx.saved_tensors  # read once: a recomputed tensor is handed out once
        prepared, saved = prepared._replace(params=tensors[: len(needs)]), tensors[len(needs) :]
        size = len(saved) // len(chunks)
        states = [saved[i : i + size] for i in range(0, len(saved), size)]
        d_out_RM = d_out_RM.contiguous()
        d_rows_RM = torch.empty_like(d_out_RM) if needs_rows else None
        backwards = list(zip(chunks, states, strict=True))[::-1]
        coming = [
            link.start(d_out_RM[chunk.span], Direction.COMBINE_GRADIENT, chunk)
            for chunk, _ in backwards
        ]
        going, gradients = [], []
        for chunk, state in backwards:
            arrived = coming.pop(0).wait()
            with drained_if_it_fails(coming, going):
                d_out = chunk.by_expert(arrived)
                d_rows, gradient = bank.chunk_bwd(prepared, d_out, state, needs_rows)
                d_rows = chunk.by_rank(d_rows) if needs_rows else None
            gradients.append(gradient)
            if d_rows_RM is not None:
                into = d_rows_RM[chunk.span]
                going.append(link.start(d_rows, Direction.DISPATCH_GRADIENT, chunk, into))
        d_params = (None,) * len(needs)
        if any(needs):
            with drained_if_it_fails(going):
                d_params = bank.chunks_bwd_params(prepared, states, gradients[::-1])
        for handle in going:
            handle.wait()
        wanted = (d if needed else None for d, needed in zip(d_params, needs, strict=True))
        return d_rows_RM, None, None, *wanted
