"""Dispatch, experts and combine between ranks, with less kept for the backward pass.

The backward pass sends gradients of the tokens to the experts' ranks without the weights of their
pairs, and the weights beside them, a number per row. The gradient of a weight is computed where the
expert is, and comes back with the rows' gradients. So the outputs are not kept::

    forward    rows -- exchange --> experts -- exchange --> outputs, combine
    backward   dy, weights -- exchange --> experts again -- exchange --> d_rows, d_weights

``lean`` keeps the rows that arrived, because an exchange costs more than M numbers per row.
``minimal`` sends them again. With overlap the backward pass computes the activation of one chunk
while the gradients of others travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .. import ops
from ..distributed import Direction, Exchange, ExchangeRecord
from ..distributed.exchanges import stream_of
from .experts import ExpertBank, PreparedExperts
from .overlap import Link, drained_if_it_fails
from .routing import Routing
from .torch_modes import is_observed, untraced

if TYPE_CHECKING:
    from .dispatcher import Chunk, SourceDropout


def keeps_less(experts: torch.nn.Module) -> bool:
    """Return whether the forward pass of this call keeps less than ``fast``.

    Wrappers and hooks that read the experts' inputs or outputs make it ``fast``.
    """
    if not isinstance(experts, ExpertBank) or experts.memory.mode == "fast":
        return False
    return torch.is_grad_enabled() and not is_observed(experts)


def through_lean(
    x_TM: torch.Tensor,
    routing: Routing,
    maps: tuple[torch.Tensor, torch.Tensor],
    chunks: Sequence[Chunk],
    experts: ExpertBank,
    exchange: Exchange,
    prepared: PreparedExperts,
    record: ExchangeRecord | None,
    drop: SourceDropout | None,
    late_bias: bool,
) -> torch.Tensor:
    """Dispatch tokens to their experts, compute and combine, [T, M]. Differentiable.

    Args:
        x_TM, routing, experts, exchange, prepared, record: those of ``dispatch_and_combine``.
        maps: ``dest_row_TK`` and ``src_pair_R`` in the order in which rows are sent.
        chunks: rows that travel together.
        drop: dropout of the outputs on the tokens' rank.
        late_bias: combine may add the experts' last bias, on one rank.
    """
    weight_TK = routing.topk_weight_TK
    if exchange.groups.ep_size == 1 and drop is None:
        (chunk,) = chunks
        given = *maps, routing.expert_TK, chunk.offsets, late_bias
        return experts.compute_lean(prepared, x_TM, weight_TK, *given)
    return _between_ranks(x_TM, weight_TK, maps, chunks, experts, exchange, prepared, record, drop)


@untraced  # a trace sees neither collectives nor threads
def _between_ranks(x_TM, weight_TK, maps, chunks, experts, exchange, prepared, record, drop):
    stream = stream_of(x_TM.device)
    link = Link(exchange, stream, record)
    plain = Link(Exchange(exchange.algorithm), stream, None)
    call = _Call(experts, prepared._replace(params=()), chunks, link, plain, maps, drop)
    return _ThroughLean.apply(x_TM, weight_TK, call, *prepared.params)


class _Call(NamedTuple):
    """Everything of a call that is no differentiable tensor."""

    experts: ExpertBank
    prepared: PreparedExperts  # its parameters are given separately
    chunks: Sequence[Chunk]
    link: Link
    plain: Link  # carries weights, without a wire format
    maps: tuple[torch.Tensor, torch.Tensor]
    drop: SourceDropout | None

    def dropped(self, out_RM: torch.Tensor) -> torch.Tensor:
        return out_RM if self.drop is None else self.drop(out_RM, *self.maps)


class _ThroughLean(torch.autograd.Function):
    """Dispatch, exchanges, experts and combine of one call."""

    @staticmethod
    def forward(ctx, x_TM, topk_weight_TK, call, *params):
        ctx.call, bank = call, call.experts
        prepared = call.prepared._replace(params=params)
        rows_RM = ops.dispatch(x_TM, *call.maps)
        out_RM = torch.empty_like(rows_RM)
        going = [
            _start(call.link, rows_RM[chunk.span], Direction.DISPATCH, chunk)
            for chunk in call.chunks
        ]
        coming, saved = [], []
        for chunk in call.chunks:
            arrived = going.pop(0).wait()
            with drained_if_it_fails(going, coming):
                out, kept = bank.lean_chunk(prepared, chunk.by_expert(arrived), chunk.offsets)
                out = chunk.by_rank(out)
            saved += kept
            into = out_RM[chunk.span]
            coming.append(_start(call.link, out, Direction.COMBINE, chunk, into))
        for handle in coming:
            handle.wait()
        ctx.save_for_backward(x_TM, topk_weight_TK, *params, *saved)
        dest_row_TK, src_pair_R = call.maps
        return ops.combine(call.dropped(out_RM), dest_row_TK, src_pair_R, topk_weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TM):
        call, bank = ctx.call, ctx.call.experts
        needs_x, needs_weight, _, *needs = ctx.needs_input_grad
        x_TM, topk_weight_TK, *tensors = ctx.saved_tensors
        prepared = call.prepared._replace(params=tuple(tensors[: len(needs)]))
        saved, (dest_row_TK, src_pair_R) = tensors[len(needs) :], call.maps
        size = len(saved) // len(call.chunks)
        states = [saved[i : i + size] for i in range(0, len(saved), size)]
        backwards = list(zip(call.chunks, states, strict=True))[::-1]

        d_out_RM = call.dropped(ops.dispatch(dy_TM.contiguous(), *call.maps))
        weight_R1 = ops.row_weights(topk_weight_TK, src_pair_R)[:, None]
        rows_RM = ops.dispatch(x_TM, *call.maps) if bank.memory.mode == "minimal" else None
        coming = [
            _start_backward(call, chunk, d_out_RM, weight_R1, rows_RM) for chunk, _ in backwards
        ]
        d_rows_RM, d_weight_R1 = torch.empty_like(d_out_RM), torch.empty_like(weight_R1)
        going, done = [], []
        for chunk, state in backwards:
            handles = coming.pop(0)
            arrived = [handle.wait() for handle in handles]
            with drained_if_it_fails(*coming, going):
                d_out, weight, *rows = map(chunk.by_expert, arrived)
                given = rows[0] if rows else None, d_out, weight.reshape(-1), chunk.offsets, state
                d_rows, d_weight, gradient = bank.lean_chunk_bwd(prepared, *given, needs_x)
                d_weight = chunk.by_rank(d_weight.view(weight.shape))
                d_rows = chunk.by_rank(d_rows) if needs_x else None
            done.append(gradient)
            into = d_weight_R1[chunk.span]
            going.append(_start(call.plain, d_weight, Direction.DISPATCH_GRADIENT, chunk, into))
            if needs_x:
                into = d_rows_RM[chunk.span]
                going.append(_start(call.link, d_rows, Direction.DISPATCH_GRADIENT, chunk, into))
        d_params = (None,) * len(needs)
        if any(needs):
            with drained_if_it_fails(going):
                d_params = bank.lean_chunks_bwd_params(prepared, done[::-1])
        for handle in going:
            handle.wait()
        d_x_TM = ops.dispatch_bwd(d_rows_RM, dest_row_TK) if needs_x else None
        d_weight_TK = ops.pair_values(d_weight_R1[:, 0], dest_row_TK) if needs_weight else None
        wanted = (d if needed else None for d, needed in zip(d_params, needs, strict=True))
        return d_x_TM, d_weight_TK, None, *wanted


class _Arrived(NamedTuple):
    """Rows of an exchange that is done, as a handle."""

    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.rows

    def drain(self) -> None:
        pass


def _start(link, rows, direction, chunk, into=None):
    """Start an exchange and return its handle; a measured one is done at once."""
    exchange, forward = link.exchange, direction in (Direction.DISPATCH, Direction.COMBINE)
    measured = exchange.timed and link.record is not None and forward
    if exchange.groups.ep_size > 1 and not measured:
        return link.start(rows, direction, chunk, into)
    move = exchange.dispatch if direction is Direction.DISPATCH else exchange.combine
    arrived = move(rows, chunk.splits, link.record) if measured else rows
    return _Arrived(arrived if into is None else into.copy_(arrived))


def _start_backward(call, chunk, d_out_RM, weight_R1, rows_RM):
    """Send the gradients of a chunk's outputs, the weights of its rows, and rows unless None."""
    handles = [
        _start(call.link, d_out_RM[chunk.span], Direction.COMBINE_GRADIENT, chunk),
        _start(call.plain, weight_R1[chunk.span], Direction.COMBINE_GRADIENT, chunk),
    ]
    if rows_RM is not None:
        unmeasured = call.link._replace(record=None)  # the others are under way
        handles.append(_start(unmeasured, rows_RM[chunk.span], Direction.DISPATCH, chunk))
    return handles
