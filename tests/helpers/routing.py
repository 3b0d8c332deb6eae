"""Routing by given logits, as a layer on one rank does it."""

from __future__ import annotations

from torch import Tensor

from fairseq_tutel.moe import MoEAux, MoEConfig, RouterCall, Routing, route_logits
from fairseq_tutel.moe.reports import make_aux


def route(
    logits_TE: Tensor,
    config: MoEConfig,
    training: bool,
    *,
    pad_T: Tensor | None = None,
    load_bias_E: Tensor | None = None,
) -> tuple[Routing, MoEAux]:
    """What a layer with these options makes of these logits."""
    tokens = len(logits_TE)
    call = RouterCall(config, training, tokens)
    routing, aux = route_logits(logits_TE, call, pad_T, load_bias_E)
    return routing, make_aux(aux, routing, tokens)


def weight_by_expert(routing: Routing) -> Tensor:
    """[T, E] combine weights."""
    weight_TK = routing.topk_weight_TK
    weight_TE = weight_TK.new_zeros(len(weight_TK), routing.num_experts)
    return weight_TE.scatter_add(1, routing.expert_TK.clamp(min=0).long(), weight_TK)
