"""Exchange, experts and exchange back in chunks, so that links and processors work at once.

Tutel (Hwang et al., arXiv 2206.03382, section 3.2). With D the exchange to the experts, C the one
back, F the experts, > start and . wait::

    forward    >D0 >D1 .. >Dn | .D0 F0 >C0 | .D1 F1 >C1 | .. | .C0 .C1 .. .Cn
    backward   >Cn .. >C0 | .Cn Fn >Dn | .. | .C0 F0 >D0 | weights | .Dn .. .D0

The backward pass is the mirror of the forward one, on every rank: collectives meet in one order.
Weight gradients are computed once over the rows of all chunks, while the last gradients travel;
per chunk they would be rounded and added as many times.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.function import once_differentiable

from .. import ops
from ..distributed import Exchange
from ..distributed.exchanges import Flight, Leg, Ticket, send, start
from ..distributed.lanes import lane_of
from .chunks import Chunk, ExpertRows
from .experts import Experts, Network


@torch.compiler.disable  # lanes are threads and streams, which a trace does not see
def overlapped(
    rows_RM: torch.Tensor,
    chunks: Sequence[Chunk],
    experts: Callable[[ExpertRows], torch.Tensor],
    exchange: Exchange,
    network: Network | None = None,
) -> torch.Tensor:
    """Send the rows to the experts and get back what these make of them. Differentiable.

    Args:
        rows_RM: [R, M], the rows of one chunk after the other's.
        chunks: two or more, the same number on all ranks.
        experts: any; of plain :class:`~fairseq_tutel.moe.Experts` the weight gradients are computed
            once, of others chunk by chunk, as autograd does it.
        exchange: between the ranks that hold the experts.
        network: of the experts, if it is not theirs as they are here.

    Returns:
        [R, M], in the order of the rows.
    """
    lane = lane_of(rows_RM.device)
    if type(experts) is not Experts or experts.has_hooks:
        if network is not None:
            experts = functools.partial(experts, network=network)
        return _through_any(rows_RM, chunks, experts, exchange, lane)
    network = experts.network(rows_RM.dtype) if network is None else network
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (rows_RM, *network.params))
    return _ThroughNetwork.apply(rows_RM, *network.params, network, chunks, exchange, lane, keep)


def _through_any(rows_RM, chunks, experts, exchange, lane):
    """The engine runs nodes of the backward pass latest first: the mirror comes by itself."""
    parts = rows_RM.split([chunk.span.stop - chunk.span.start for chunk in chunks])
    going = [
        start(exchange, rows, Leg.DISPATCH, chunk.parts, lane)
        for rows, chunk in zip(parts, chunks, strict=True)
    ]
    coming = []
    for chunk in chunks:
        rows = going.pop(0).wait()
        with _landed_if_it_fails(going, coming):
            out = chunk.by_rank(experts(ExpertRows(chunk.by_expert(rows), chunk.offsets)))
        coming.append(start(exchange, out, Leg.COMBINE, chunk.parts, lane))
    return torch.cat([ticket.wait() for ticket in coming])


@contextlib.contextmanager
def _landed_if_it_fails(*under_way: Iterable[Flight | Ticket]):
    """Around what experts compute: their error waits for the exchanges that are under way.

    Until then these write into memory that the caller would be given anew, and would meet whatever
    he exchanges next. Ranks have started the same ones. Not around waiting: if an exchange fails,
    those behind it may wait for ever.
    """
    try:
        yield
    except Exception:
        for each in itertools.chain(*under_way):
            each.land()
        raise


class _ThroughNetwork(torch.autograd.Function):
    """The experts' own network; nothing else runs between its steps, forth or back."""

    @staticmethod
    def forward(ctx, rows_RM, w1, b1, w2, b2, network, chunks, exchange, lane, keep):
        params = (w1, b1, w2, b2)
        out_RM = torch.empty_like(rows_RM)
        going = [
            send(exchange, rows_RM[chunk.span], Leg.DISPATCH, chunk.parts, lane) for chunk in chunks
        ]
        coming, saved = [], []
        for chunk in chunks:
            arrived = going.pop(0).arrive()
            with _landed_if_it_fails(going, coming):
                out, state = ops.ffn_chunk(
                    chunk.by_expert(arrived),
                    *params,
                    offsets=chunk.offsets,
                    options=network.options,
                    keep_hidden=keep,
                )
                out = chunk.by_rank(out)
            into = out_RM[chunk.span]
            coming.append(send(exchange, out, Leg.COMBINE, chunk.parts, lane, into))
            saved += state if keep else ()
        for flight in coming:
            flight.arrive()
        ctx.call = network.options, chunks, exchange, lane
        ctx.save_for_backward(*params, *saved)
        return out_RM

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_RM):
        options, chunks, exchange, lane = ctx.call
        tensors = ctx.saved_tensors  # once: a recomputed tensor is handed out once
        params, saved = tensors[:4], tensors[4:]
        size = len(ops.FFNChunk._fields)
        states = [ops.FFNChunk(*saved[i : i + size]) for i in range(0, len(saved), size)]
        needs_rows, needs_params = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:5])
        d_out_RM = d_out_RM.contiguous()
        d_rows_RM = torch.empty_like(d_out_RM) if needs_rows else None
        backwards = list(zip(chunks, states, strict=True))[::-1]
        coming = [
            send(exchange, d_out_RM[chunk.span], Leg.COMBINE_GRADIENT, chunk.parts, lane)
            for chunk, _ in backwards
        ]
        going, gradients = [], []
        for chunk, state in backwards:
            arrived = coming.pop(0).arrive()
            with _landed_if_it_fails(coming, going):
                d_out = chunk.by_expert(arrived)
                gradient = ops.ffn_chunk_bwd(
                    d_out, state, *params, options=options, needs_rows=needs_rows
                )
                d_rows = chunk.by_rank(gradient.d_rows) if needs_rows else None
            gradients.append(gradient)
            if needs_rows:
                into = d_rows_RM[chunk.span]
                going.append(send(exchange, d_rows, Leg.DISPATCH_GRADIENT, chunk.parts, lane, into))
        d_params = (None,) * 4
        if needs_params:
            with _landed_if_it_fails(going):
                d_params = ops.ffn_chunks_bwd_params(
                    states, gradients[::-1], *params, options=options
                )
        for flight in going:
            flight.arrive()
        needs = ctx.needs_input_grad[1:5]
        wanted = (d if needed else None for d, needed in zip(d_params, needs, strict=True))
        return d_rows_RM, *wanted, None, None, None, None, None
