"""Dispatch, experts and combine between ranks, with less kept for the backward pass.

The tokens' rank does not keep the experts' outputs, although the gradient of a pair's weight needs
them. Instead the backward pass sends the tokens' gradients (dy) and, as one number per row, the
weights. The expert's rank computes its output again, and returns the gradients of both::

    forward    rows -- exchange --> experts -- exchange --> outputs, combine
    backward   dy, weights -- exchange --> experts again -- exchange --> d_rows, d_weights

``lean`` keeps the rows that arrived, because an exchange costs more than M numbers per row.
``minimal`` sends them again.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch.autograd.function import once_differentiable

from .. import ops
from ..distributed import Direction, Exchange, ExchangeRecord
from ..distributed.exchanges import stream_of
from .chunks import Chunk
from .experts import Experts, PreparedExperts
from .overlap import Link, needed_gradients, pipeline, split_states
from .routing import Routing
from .source_dropout import SourceDropout
from .torch_modes import is_observed, untraced


def keeps_less(experts: torch.nn.Module) -> TypeGuard[Experts]:
    """Return whether the forward pass of this call keeps less than ``fast``.

    Wrappers and hooks that read the experts' inputs or outputs make it ``fast``.
    """
    less = isinstance(experts, Experts) and experts.memory.mode != "fast"
    return less and torch.is_grad_enabled() and not is_observed(experts)


class LeanCall(NamedTuple):
    """Arguments of a call beside tokens and routing, as in ``dispatch_and_combine``."""

    experts: Experts
    prepared: PreparedExperts
    chunks: Sequence[Chunk]
    maps: tuple[torch.Tensor, torch.Tensor]  # in the order in which rows are sent
    exchange: Exchange
    record: ExchangeRecord | None
    drop: SourceDropout | None

    def dropped(self, out_RM: torch.Tensor) -> torch.Tensor:
        return out_RM if self.drop is None else self.drop(out_RM, *self.maps)


def through_lean(
    x_TM: torch.Tensor, routing: Routing, call: LeanCall, late_bias: bool
) -> torch.Tensor:
    """Dispatch tokens to their experts, compute and combine, [T, M]. Differentiable.

    ``late_bias`` lets combine add the experts' last bias if there is one rank.
    """
    weight_TK, prepared = routing.topk_weight_TK, call.prepared
    if call.exchange.groups.ep_size == 1 and call.drop is None:
        (chunk,) = call.chunks
        how = {"offsets": chunk.offsets, "late_bias": late_bias}
        pairs = weight_TK, *call.maps, routing.expert_TK
        return call.experts.compute_lean(prepared, x_TM, *pairs, **how)
    return _between_ranks(x_TM, weight_TK, call)


@untraced  # a trace sees neither collectives nor threads
def _between_ranks(x_TM, weight_TK, call):
    stream, params = stream_of(x_TM.device), call.prepared.params
    # the second link carries weights, without a wire format
    plain = Link(Exchange(call.exchange.algorithm), stream, None)
    links = Link(call.exchange, stream, call.record), plain
    call = call._replace(prepared=call.prepared._replace(params=()))
    return _ThroughLean.apply(x_TM, weight_TK, call, links, *params)


class _ThroughLean(torch.autograd.Function):
    """Dispatch, exchanges, experts and combine of one call."""

    @staticmethod
    def forward(ctx, x_TM, topk_weight_TK, call, links, *params):
        ctx.call, ctx.links, (link, _) = call, links, links
        prepared = call.prepared._replace(params=params)
        rows_RM = ops.dispatch(x_TM, *call.maps)
        out_RM = torch.empty_like(rows_RM)

        def compute(chunk, rows):
            out, kept = call.experts.lean_chunk(prepared, chunk.by_expert(rows), chunk.offsets)
            return [chunk.by_rank(out)], kept

        _, saved, _ = pipeline(
            call.chunks,
            lambda chunk: [link.start(rows_RM[chunk.span], Direction.DISPATCH, chunk)],
            compute,
            lambda chunk, out: [link.start(out, Direction.COMBINE, chunk, out_RM[chunk.span])],
        )
        ctx.save_for_backward(x_TM, topk_weight_TK, *params, *itertools.chain(*saved))
        dest_row_TK, src_pair_R = call.maps
        return ops.combine(call.dropped(out_RM), dest_row_TK, src_pair_R, topk_weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TM):
        call, bank, (link, plain) = ctx.call, ctx.call.experts, ctx.links
        needs_x, needs_weight, _, _, *needs = ctx.needs_input_grad
        x_TM, topk_weight_TK, *tensors = ctx.saved_tensors
        prepared = call.prepared._replace(params=tuple(tensors[: len(needs)]))
        states = iter(split_states(tensors[len(needs) :], len(call.chunks))[::-1])
        dest_row_TK, src_pair_R = call.maps
        d_out_RM = call.dropped(ops.dispatch(dy_TM.contiguous(), *call.maps))
        weight_R1 = ops.row_weights(topk_weight_TK, src_pair_R)[:, None]
        rows_RM = ops.dispatch(x_TM, *call.maps) if bank.memory.mode == "minimal" else None
        d_rows_RM, d_weight_R1 = torch.empty_like(d_out_RM), torch.empty_like(weight_R1)

        def send(chunk):
            yield link.start(d_out_RM[chunk.span], Direction.COMBINE_GRADIENT, chunk)
            yield plain.start(weight_R1[chunk.span], Direction.COMBINE_GRADIENT, chunk)
            if rows_RM is not None:
                # a measured exchange would run at once, before those that are queued
                unmeasured = link._replace(record=None)
                yield unmeasured.start(rows_RM[chunk.span], Direction.DISPATCH, chunk)

        def compute(chunk, *arrived):
            d_out, weight, *rows = map(chunk.by_expert, arrived)
            sent_again, weight_R = rows[0] if rows else None, weight.reshape(-1)
            d_rows, d_weight, *rest = bank.lean_chunk_bwd(
                prepared, sent_again, d_out, weight_R, chunk.offsets, next(states), needs_x
            )
            d_weight = chunk.by_rank(d_weight.view(weight.shape))
            return [d_weight, chunk.by_rank(d_rows) if needs_x else None], rest

        def send_back(chunk, d_weight, d_rows):
            into = d_weight_R1[chunk.span]
            yield plain.start(d_weight, Direction.DISPATCH_GRADIENT, chunk, into)
            if needs_x:
                into = d_rows_RM[chunk.span]
                yield link.start(d_rows, Direction.DISPATCH_GRADIENT, chunk, into)

        def params_bwd(found):
            states, gradients = zip(*found[::-1], strict=True)
            return bank.chunks_bwd_params(prepared, states, gradients)

        meanwhile = params_bwd if any(needs) else None
        _, _, d_params = pipeline(call.chunks[::-1], send, compute, send_back, meanwhile)
        d_x_TM = ops.dispatch_bwd(d_rows_RM, dest_row_TK) if needs_x else None
        d_weight_TK = ops.pair_values(d_weight_R1[:, 0], dest_row_TK) if needs_weight else None
        return d_x_TM, d_weight_TK, None, None, *needed_gradients(d_params, needs)
