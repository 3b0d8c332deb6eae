"""Send tokens to their experts and back.

::

    x_TM -- ops.dispatch --> rows by expert -- exchange.dispatch --> rows of the local experts
    y_TM <-- ops.combine -- rows by expert <-- exchange.combine  --  expert outputs

With r > 1 each row goes to r ranks, each with a part of its expert. The routing then has r * K
choices per token: dispatch writes the copies, combine adds the results in fp32.
"""

from typing import TypeGuard

import torch

from .. import ops
from ..distributed import ExchangeRecord
from .chunks import arrange, to_parts
from .exchange_choice import ExchangeChoice
from .experts import ExpertBank, ExpertRows, Experts
from .helped_experts import balanced
from .lean import LeanCall, keeps_less, through_lean
from .overlap import overlapped
from .routing import Routing
from .source_dropout import SourceDropout
from .torch_modes import is_observed


def dispatch_and_combine(
    x_TM: torch.Tensor,
    routing: Routing,
    experts: ExpertBank,
    choice: ExchangeChoice,
    record: ExchangeRecord | None,
) -> torch.Tensor:
    """Send each token to its experts, apply them, and add the weighted results.

    Differentiable, [T, M] -> [T, M]; zero for a token that has no kept pair.
    """
    exchange, parallelism = choice.exchange, choice.parallelism
    prepared = bias_EM = drop = None
    lean = keeps_less(experts)
    if is_observed(experts) and not x_TM.is_meta and any(p.is_meta for p in experts.parameters()):
        raise ValueError(f"the experts' weights are on the meta device: {ops.HOW_TO_OFFLOAD}")
    # wrappers of torch.compile and checkpointing forward these attributes to the bank
    if not parallelism.is_replicated and experts.can_be_gathered:
        prepared = experts.prepare(x_TM.dtype, parallelism)
        if prepared and prepared.dropout_at_source:
            drop = SourceDropout.draw(x_TM, routing, parallelism, prepared.dropout_at_source)
        routing = to_parts(routing, parallelism.num_destinations)
    elif lean:
        prepared = experts.prepare(x_TM.dtype)
    elif exchange.groups.ep_size == 1 and ops.combine_takes_bias(x_TM):
        prepared, bias_EM = _without_output_bias(experts, x_TM.dtype)
    counted = None
    if choice.balances and not routing.padded:
        routing, experts, counted = balanced(routing, experts, choice, x_TM, record)
    maps, chunks = arrange(routing, exchange, choice.overlap_degree, counted)
    if lean and prepared is not None:
        call = LeanCall(experts, prepared, chunks, maps, exchange, record, drop)
        return through_lean(x_TM, routing, call, late_bias=parallelism.is_replicated)
    chunk = chunks[0]
    if len(chunks) > 1:
        out = overlapped(ops.dispatch(x_TM, *maps), chunks, experts, exchange, prepared, record)
    elif _experts_gather(experts, x_TM, routing, prepared, exchange):
        out = experts.compute_tokens(prepared, x_TM, *maps, chunk.offsets)
    else:
        rows = exchange.dispatch(ops.dispatch(x_TM, *maps), chunk.splits, record)
        out = experts(ExpertRows(chunk.by_expert(rows), chunk.offsets), prepared)
        out = exchange.combine(chunk.by_rank(out), chunk.splits, record)
    if drop is not None:
        out = drop(out, *maps)
    expert_TK = None if bias_EM is None else routing.expert_TK
    return ops.combine(out, *maps, routing.topk_weight_TK, bias_EM, expert_TK)


def _without_output_bias(experts, dtype):
    """Return the prepared experts without their last bias, and that bias for combine, or None.

    Return (None, None), so that the experts add the bias, if wrappers or hooks read the outputs.
    """
    if not isinstance(experts, ExpertBank) or is_observed(experts):
        return None, None
    prepared = experts.prepare(dtype)
    return (None, None) if prepared is None else experts.without_output_bias(prepared)


def _experts_gather(experts, x_TM, routing, prepared, exchange) -> TypeGuard[Experts]:
    """Return whether the experts read tokens where they are: ragged, on one rank, unmeasured."""
    if routing.padded or prepared is None or exchange.groups.ep_size > 1 or exchange.timed:
        return False
    return isinstance(experts, Experts) and experts.gathers_tokens(prepared, x_TM)
