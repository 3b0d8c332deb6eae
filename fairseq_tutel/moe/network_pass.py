"""Dispatch, exchanges, the experts' network and combine of one call, as one autograd function.

The rows travel in chunks while other chunks are computed: Tutel's adaptive pipelining (Hwang et
al., arXiv 2206.03382, section 3.2). D: exchange to the experts, C: exchange back, F: experts;
> start, . wait; the number is that of the chunk::

    forward    >D0 >D1 .. >Dn | .D0 F0 >C0 | .D1 F1 >C1 | .. | .C0 .C1 .. .Cn
    backward   >Cn .. >C0 | .Cn Fn >Dn | .. | .C0 F0 >D0 | weights | .Dn .. .D0

The backward pass mirrors the forward pass on every rank, so that collectives have one order. Weight
gradients are computed once over all chunks, while the last gradients travel.

If the experts' outputs are not kept, although the gradient of a pair's weight needs them, the
backward pass sends the tokens' gradients (dy) and, as one number per row, the weights. The
expert's rank returns the gradients of both. Rows that were not kept are sent again.
"""

import itertools

import torch
from torch.autograd.function import once_differentiable

from .. import ops
from ..distributed import Direction
from .call_plan import CallPlan
from .links import needed_gradients, pipeline, split_states
from .torch_modes import untraced, without_autocast


def through_network(x_TM: torch.Tensor, plan: CallPlan) -> torch.Tensor:
    """Compute a call whose experts have a network, [T, M] -> [T, M]; differentiable."""
    tensors = x_TM, plan.weight_TK, *plan.prepared.params
    needed = any(tensor.requires_grad for tensor in tensors)
    if not (needed and torch.is_grad_enabled()):
        plan = plan._replace(memory=None)
    return _in_chunks(x_TM, plan)


@untraced  # a trace sees neither collectives nor threads
def _in_chunks(x_TM, plan):
    given = plan._replace(prepared=plan.prepared._replace(params=()))
    return _Pass.apply(x_TM, plan.weight_TK, given, *plan.prepared.params)


class _Pass(torch.autograd.Function):
    """One call of a network, in chunks."""

    @staticmethod
    def forward(ctx, x_TM, weight_TK, plan, *params):
        ctx.plan, network, link = plan, plan.prepared.network, plan.link
        rows_RM = ops.dispatch(x_TM, *plan.maps)
        out_RM = torch.empty_like(rows_RM) if len(plan.chunks) > 1 else None

        def compute(chunk, rows):
            source = ops.Source(chunk.by_expert(rows), chunk.offsets)
            out, saved = network.forward(source, params, plan.memory)
            return [chunk.by_rank(out)], (*plan.kept_rows(source.values), *saved)

        with without_autocast(x_TM.device):
            arrived, saved, _ = pipeline(
                plan.chunks,
                lambda chunk: [link.start(rows_RM[chunk.span], Direction.DISPATCH, chunk)],
                compute,
                lambda chunk, out: [link.start(out, Direction.COMBINE, chunk, chunk.of(out_RM))],
            )
        out_RM = plan.dropped(arrived[0] if out_RM is None else out_RM)
        kept_RM = out_RM if plan.keeps_outputs else out_RM.new_empty(0)
        ctx.save_for_backward(x_TM, weight_TK, kept_RM, *params, *itertools.chain(*saved))
        dest_row_TK, src_pair_R = plan.maps
        return ops.combine(out_RM, dest_row_TK, src_pair_R, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TM):
        plan, network, link = ctx.plan, ctx.plan.prepared.network, ctx.plan.link
        needs_x, needs_weight, _, *needs = ctx.needs_input_grad
        tensors = ctx.saved_tensors  # read once: a recomputed tensor is handed out once
        (x_TM, weight_TK, out_RM), params = tensors[:3], tensors[3 : 3 + len(needs)]
        later = iter(split_states(tensors[3 + len(needs) :], len(plan.chunks))[::-1])
        travels, d_weight_TK = plan.gradients(dy_TM.contiguous(), x_TM, weight_TK, out_RM)
        d_rows_RM = torch.empty_like(travels.d_out_RM) if needs_x else None
        weight_R1 = travels.weight_R1
        d_weight_R1 = None if weight_R1 is None else torch.empty_like(weight_R1)

        def send(chunk):
            yield link.start(travels.d_out_RM[chunk.span], Direction.COMBINE_GRADIENT, chunk)
            if weight_R1 is not None:
                weight = weight_R1[chunk.span]
                yield link.plain().start(weight, Direction.COMBINE_GRADIENT, chunk)
            if travels.rows_RM is not None:
                # a measured exchange would run at once, before those that are queued
                unmeasured = link._replace(record=None)
                yield unmeasured.start(travels.rows_RM[chunk.span], Direction.DISPATCH, chunk)

        def compute(chunk, *arrived):
            d_out, *rest = map(chunk.by_expert, arrived)
            row, scale, *saved = next(later)
            weight = rest.pop(0) if weight_R1 is not None else None
            rows = rest[0] if rest else ops.restore(row, scale, d_out).view(d_out.shape)
            d_rows, d_weight, pending = network.backward(
                ops.Source(d_out, chunk.offsets),
                ops.Source(rows, chunk.offsets),
                None if weight is None else weight.reshape(-1),
                saved,
                params,
                {"needs_rows": needs_x, "needs_params": any(needs)},
            )
            if weight is not None and d_weight is not None:
                d_weight = chunk.by_rank(d_weight.view(weight.shape))
            return [d_weight, chunk.by_rank(d_rows) if needs_x else None], pending

        def send_back(chunk, d_weight, d_rows):
            if d_weight_R1 is not None:
                into = d_weight_R1[chunk.span]
                yield link.plain().start(d_weight, Direction.DISPATCH_GRADIENT, chunk, into)
            if d_rows_RM is not None:
                into = d_rows_RM[chunk.span]
                yield link.start(d_rows, Direction.DISPATCH_GRADIENT, chunk, into)

        def params_bwd(pending):
            return network.backward_params(pending[::-1], params)

        meanwhile = params_bwd if any(needs) else None
        with without_autocast(x_TM.device):
            _, _, d_params = pipeline(plan.chunks[::-1], send, compute, send_back, meanwhile)
        d_x_TM = None if d_rows_RM is None else ops.dispatch_bwd(d_rows_RM, plan.maps[0])
        if d_weight_R1 is not None and needs_weight:
            d_weight_TK = ops.pair_values(d_weight_R1[:, 0], plan.maps[0]).to(weight_TK.dtype)
        d_weight_TK = d_weight_TK if needs_weight else None
        return d_x_TM, d_weight_TK, None, *needed_gradients(d_params, needs)
