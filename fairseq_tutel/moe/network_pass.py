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
from .links import pipeline
from .torch_modes import untraced, without_autocast


def through_network(x_TM: torch.Tensor, plan: CallPlan) -> torch.Tensor:
    """Compute a call whose experts have a network, [T, M] -> [T, M]; differentiable."""
    tensors = x_TM, plan.weight_TK, *plan.prepared.params
    needed = any(tensor.requires_grad for tensor in tensors)
    if not (needed and torch.is_grad_enabled()):
        plan = plan._replace(memory=None)
    return _apply(x_TM, plan)


@untraced  # a trace sees neither collectives nor threads
def _apply(x_TM, plan):
    # tensors leave the plan and become arguments, so that activation checkpointing knows them
    tensors = plan.weight_TK, *plan.maps, *plan.prepared.params
    prepared = plan.prepared._replace(params=())
    plan = plan._replace(prepared=prepared, weight_TK=None, expert_TK=None, maps=())
    return _Pass.apply(plan, x_TM, *tensors)


class _Pass(torch.autograd.Function):
    """One call of a network, in chunks."""

    @staticmethod
    def forward(ctx, plan, x_TM, weight_TK, dest_row_TK, src_pair_R, *params):
        ctx.plan, network, link = plan, plan.prepared.network, plan.link
        plan = plan._replace(maps=(dest_row_TK, src_pair_R))
        rows_RM = ops.dispatch(x_TM, dest_row_TK, src_pair_R)
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
        tensors = x_TM, weight_TK, dest_row_TK, src_pair_R, kept_RM, *params
        ctx.save_for_backward(*tensors, *itertools.chain(*saved))
        return ops.combine(out_RM, dest_row_TK, src_pair_R, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TM):
        _, needs_x, needs_weight, _, _, *needs = ctx.needs_input_grad
        tensors = ctx.saved_tensors  # read once: a recomputed tensor is handed out once
        (x_TM, weight_TK, *maps, out_RM), rest = tensors[:5], tensors[5:]
        params, saved = rest[: len(needs)], rest[len(needs) :]
        plan = ctx.plan._replace(maps=tuple(maps))
        travels, d_weight_TK = plan.gradients(dy_TM.contiguous(), x_TM, weight_TK, out_RM)
        with without_autocast(x_TM.device):
            run = _Backward(plan, travels, params, saved, needs_x, any(needs))
            d_rows_RM, d_weight_R1, d_params = run.through()
        d_x_TM = None if d_rows_RM is None else ops.dispatch_bwd(d_rows_RM, maps[0])
        if d_weight_R1 is not None:
            d_weight_TK = ops.pair_values(d_weight_R1[:, 0], maps[0]).to(weight_TK.dtype)
        d_weight_TK = d_weight_TK if needs_weight else None
        pairs = zip(d_params or needs, needs, strict=True)
        needed = (d_param if need else None for d_param, need in pairs)
        return None, d_x_TM, d_weight_TK, None, None, *needed


class _Backward:
    """The pipeline of a backward pass: what is sent, computed, and sent back for a chunk."""

    def __init__(self, plan, travels, params, saved, needs_rows, needs_params):
        self._plan, self._params, self._travels = plan, params, travels
        self._network, self._link = plan.prepared.network, plan.link
        many, weight_R1 = len(plan.chunks) > 1, travels.weight_R1
        self._needs = {"needs_rows": needs_rows, "needs_params": needs_params}
        # gradients of the weights with those of the rows, instead of over all chunks at the end
        self._needs["at_once"] = not many and self._network.is_operator
        size = len(saved) // len(plan.chunks)  # tensors of one chunk
        of_chunks = [saved[i : i + size] for i in range(0, len(saved), size)]
        self._saved = reversed(of_chunks)  # the last chunk is computed first
        self._d_rows_RM = torch.empty_like(travels.d_out_RM) if many else None
        self._d_weight_R1 = torch.empty_like(weight_R1) if many and weight_R1 is not None else None

    def through(self):
        """Return the gradients of the rows, of their weights or None, and of the parameters."""
        chunks, weighs = self._plan.chunks[::-1], self._travels.weight_R1 is not None
        needs_rows = self._needs["needs_rows"]
        meanwhile = self._compute_params if self._needs["needs_params"] else None
        steps = self._send, self._compute, self._send_back, meanwhile
        arrived, _, d_params = pipeline(chunks, *steps)
        d_rows_RM, d_weight_R1 = self._d_rows_RM, self._d_weight_R1
        if not needs_rows:
            d_rows_RM = None
        if len(chunks) == 1:
            d_weight_R1 = arrived[0] if weighs else None
            d_rows_RM = arrived[-1] if needs_rows else None
        return d_rows_RM, d_weight_R1, d_params

    def _send(self, chunk):
        link, (d_out_RM, weight_R1, rows_RM) = self._link, self._travels
        yield link.start(d_out_RM[chunk.span], Direction.COMBINE_GRADIENT, chunk)
        if weight_R1 is not None:
            yield link.plain().start(weight_R1[chunk.span], Direction.COMBINE_GRADIENT, chunk)
        if rows_RM is not None:
            # a measured exchange would run at once, before those that are queued
            unmeasured = link._replace(record=None)
            yield unmeasured.start(rows_RM[chunk.span], Direction.DISPATCH, chunk)

    def _compute(self, chunk, *arrived):
        d_out, *rest = map(chunk.by_expert, arrived)
        row, scale, *saved = next(self._saved)
        weight = rest.pop(0) if self._travels.weight_R1 is not None else None
        rows = rest[0] if rest else ops.restore(row, scale, d_out).view(d_out.shape)
        sources = ops.Source(d_out, chunk.offsets), ops.Source(rows, chunk.offsets)
        weight_R = None if weight is None else weight.reshape(-1)
        d_rows, d_weight, pending = self._network.backward(
            *sources, weight_R, saved, self._params, self._needs
        )
        if weight is not None:
            d_weight = chunk.by_rank(d_weight.view(weight.shape))
        return [d_weight, chunk.by_rank(d_rows) if self._needs["needs_rows"] else None], pending

    def _send_back(self, chunk, d_weight, d_rows):
        link, direction = self._link, Direction.DISPATCH_GRADIENT
        if d_weight is not None:
            yield link.plain().start(d_weight, direction, chunk, chunk.of(self._d_weight_R1))
        if d_rows is not None:
            yield link.start(d_rows, direction, chunk, chunk.of(self._d_rows_RM))

    def _compute_params(self, pending):
        return self._network.backward_params(pending[::-1], self._params)
