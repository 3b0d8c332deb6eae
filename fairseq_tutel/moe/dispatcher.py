"""Send tokens to their experts and back.

::

    x_TM -- ops.dispatch --> rows by expert -- exchange.dispatch --> rows of the local experts
    y_TM <-- ops.combine -- rows by expert <-- exchange.combine  --  expert outputs

With r > 1 each row goes to r ranks, each with a part of its expert. The routing then has r * K
choices per token: dispatch writes the copies, combine adds the results in fp32.
"""

import torch

from .. import ops
from ..distributed import Direction, ExchangeRecord
from .call_plan import CallPlan, plan_call
from .exchange_choice import ExchangeChoice
from .experts import ExpertBank, ExpertRows
from .links import pipeline
from .network_pass import through_network
from .routing import Routing
from .torch_modes import untraced


def dispatch_and_combine(
    x_TM: torch.Tensor,
    routing: Routing,
    experts: ExpertBank,
    choice: ExchangeChoice,
    record: ExchangeRecord | None,
) -> torch.Tensor:
    """Send each token to its experts, apply them, and add the weighted results; differentiable.

    Wrapped or hooked experts are called as modules. A network of operators is one function of
    chunks and ranks; a fused one on a single rank is one operator, which torch.compile keeps whole.
    """
    plan = plan_call(x_TM.shape[1], x_TM.dtype, routing, experts, choice, record)
    if not plan.has_network:
        return through_modules(x_TM, plan)
    if plan.is_operator:
        return ops.routed_ffn(x_TM, *plan.operands, **plan.operator_options)
    return through_network(x_TM, plan)


def through_modules(x_TM: torch.Tensor, plan: CallPlan) -> torch.Tensor:
    """Compute a call whose experts are called with rows, [T, M] -> [T, M]; by autograd."""
    rows_RM = ops.dispatch(x_TM, *plan.maps)
    in_chunks = _call_in_chunks if plan.link.stream is None else _overlapped
    out_RM, (dest_row_TK, src_pair_R) = plan.dropped(in_chunks(rows_RM, plan)), plan.maps
    return ops.combine(out_RM, dest_row_TK, src_pair_R, plan.weight_TK)


def _call_in_chunks(rows_RM, plan):
    """Send, compute and send back; autograd reverses the order: it runs the latest node first."""
    chunks, link, experts = plan.chunks, plan.link, plan.experts
    parts = iter(rows_RM.split([chunk.span.stop - chunk.span.start for chunk in chunks]))

    def compute(chunk, rows):
        out = experts(ExpertRows(chunk.by_expert(rows), chunk.offsets), plan.prepared)
        return [chunk.by_rank(out)], None

    out, _, _ = pipeline(
        chunks,
        lambda chunk: [link.start(next(parts), Direction.DISPATCH, chunk)],
        compute,
        lambda chunk, out: [link.start(out, Direction.COMBINE, chunk)],
    )
    return out[0] if len(out) == 1 else torch.cat(out)


_overlapped = untraced(_call_in_chunks)  # a trace sees neither threads nor CUDA streams
