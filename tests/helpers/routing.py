"""Routing by given logits, as a layer on one rank does it."""

from __future__ import annotations

from torch import Tensor

from fairseq_tutel.moe import MoEAux, MoEConfig, RouterStep, Routing, route_logits


def route(
    logits_TE: Tensor,
    config: MoEConfig,
    training: bool,
    *,
    pad_T: Tensor | None = None,
    num_tokens: int | None = None,
    load_bias_E: Tensor | None = None,
) -> tuple[Routing, MoEAux]:
    """What a layer with these options makes of these logits; ``num_tokens`` is T by default."""
    tokens = len(logits_TE)
    step = RouterStep(config, training, tokens if num_tokens is None else num_tokens)
    routing, aux = route_logits(logits_TE, step, pad_T, load_bias_E)
    counts = (routing.num_routed_KE, routing.num_kept_per_expert_E, tokens)
    return routing, MoEAux(
        *aux[:3],
        *counts,
        prob_sum_E=aux.prob_sum_E,
        bias_counts=aux.bias_counts,
        num_null_KN=aux.num_null_KN,
        num_full_K=routing.num_full_K,
    )
