"""Routing from logits: scores, top-k selection, rows, losses and counts.

Numerics follow fairseq's ``moe`` branch (top1gate.py, top2gate.py) for K = 1 and 2; larger K
extends its top-2 rules. Differences:

- fp32 gating does not round half-precision products: logits are fp32.
- Padding and rejected second choices get no row and no weight. In the branch they overwrite the
  first token of an expert.
- Evaluation is deterministic: ``sampling`` and ``random`` take the next best expert.
"""

import dataclasses
import math
from contextlib import nullcontext
from typing import NamedTuple

import torch

from ... import ops
from .. import losses
from ..given_choices import decode, encode, in_given_places, key_of_given
from ..load_bias import margin_histogram
from ..overflow import count_pairs
from ..reports import RouterAux
from ..routing import RouterCall, Routing, build_routing, share_of_gates
from ..torch_modes import outside_checkpoints
from .groups import limit_to_groups


class Scores(NamedTuple):
    """Values by which tokens choose, fp32 or fp64, with gradient; E includes null experts."""

    logits_TE: torch.Tensor  # before the noise of training
    noisy_TE: torch.Tensor  # with the noise
    score_TE: torch.Tensor  # its softmax is the distribution over the experts
    pad_T: torch.Tensor | None  # bool, tokens that choose nothing; None: all choose


class Selection(NamedTuple):
    """Experts of each token, and sums for losses and metrics; sums are (0,) without reports."""

    expert_TK: torch.Tensor  # int32, best first; -1 for padding
    gate_TK: torch.Tensor  # fp32 scores of these experts; differentiable
    prob_sum_E: torch.Tensor  # fp32, sum of the probabilities over T tokens; differentiable
    entropy_sum: torch.Tensor  # fp32 scalar, sum over tokens of the entropy in nats
    lse_T: torch.Tensor  # fp32, logsumexp of the logits; differentiable
    fallback: tuple[torch.Tensor, torch.Tensor] | None = None  # [T, R], next best, their scores
    all_TK: torch.Tensor | None = None  # int32, also choices of padding; None if padding is masked


class Counted(NamedTuple):
    """Tokens over which losses are means; E includes null experts."""

    live_T: torch.Tensor | None  # bool, these tokens; None: all
    num_tokens: int | torch.Tensor  # a tensor has the dtype of the probabilities
    prob_sum_E: torch.Tensor  # fp32, sum of the probabilities; differentiable
    pairs_E: torch.Tensor  # int, how often the tokens chose each expert
    choices: int  # choices of a token that pairs_E counts


def route_logits(
    logits_TE: torch.Tensor,
    call: RouterCall,
    pad_mask_T: torch.Tensor | None = None,
    load_bias_E: torch.Tensor | None = None,
) -> tuple[Routing, RouterAux | None]:
    """Choose the K best experts of each token, and return the routing and its losses.

    Args:
        logits_TE: with gradient, null experts last. Half logits are cast to fp32.
        call: options of the call. Without ``call.reports`` the second result is None.
        pad_mask_T: bool, True for padding (default None: no padding).
        load_bias_E: fp32, the router's ``load_bias`` (default None: without that option).
    """
    config = call.config
    if logits_TE.shape[1] != config.num_outputs:
        nulls = f" and {config.null_experts} null experts" if config.null_experts else ""
        has = f"the layer has {config.num_experts}{nulls}"
        raise ValueError(f"the gate gave logits for {logits_TE.shape[1]} experts, {has}")
    if config.load_bias != "none" and load_bias_E is None:
        raise ValueError(
            f"load_bias={config.load_bias!r} needs a router that passes it to route_logits()"
        )
    scores = _scores(logits_TE, call, pad_mask_T)
    chosen, bias_counts = select_top_k(scores, call, load_bias_E)
    of_experts, num_null_KN = _without_null_experts(chosen, call)
    routing, rejected_TK = _assign_rows(of_experts, call, scores.score_TE)
    if call.steering is not None:
        call.steering.chosen_TK = encode(chosen.expert_TK, rejected_TK)
    if not call.reports:
        return routing, None
    with nullcontext() if call.reports_again else outside_checkpoints():
        report = _report(scores, chosen, of_experts, routing, call, num_null_KN, bias_counts)
    return routing, report


def _report(scores, chosen, of_experts, routing, call, num_null_KN, bias_counts) -> RouterAux:
    """Return losses and counts. ``of_experts`` is ``chosen`` without choices of null experts."""
    config, num_fillers = call.config, call.num_fillers(len(scores.score_TE))
    num_chosen_KE = balanced_KE = routing.num_routed_KE
    if _second_by(call, "random"):
        num_chosen_KE = count_pairs(of_experts.expert_TK, config.num_experts)
    if num_null_KN is not None:
        # choices of experts before rejection: choices of null experts are not rejected
        balanced_KE = torch.cat([num_chosen_KE, num_null_KN], 1)
    elif config.balance_over != "unpadded":
        if chosen.all_TK is not None:
            num_chosen_KE = count_pairs(chosen.all_TK, config.num_experts)
        if num_fillers:  # with equal logits they choose the first experts
            num_chosen_KE = num_chosen_KE.clone()
            num_chosen_KE.diagonal().add_(num_fillers)
    entropy_sum = chosen.entropy_sum.detach()
    if num_fillers:
        entropy_sum = entropy_sum + num_fillers * math.log(config.num_outputs)
    if call.training and config.load_bias == "sign":
        bias_counts = balanced_KE.sum(0, dtype=torch.int32)
    counted = _count_tokens(scores, chosen, balanced_KE, call)
    return RouterAux(
        _router_loss(scores, chosen, counted, call),
        entropy_sum,
        num_chosen_KE,
        *_for_all_ranks(counted, call),
        bias_counts=bias_counts,
        num_null_KN=num_null_KN,
        num_fillers=num_fillers,
    )


def jitter_tokens(x_TM: torch.Tensor, call: RouterCall) -> torch.Tensor:
    """Multiply by uniform(1-j, 1+j) in training (Switch Transformer, section 2.2)."""
    jitter = call.config.input_jitter
    if not call.training or jitter == 0:
        return x_TM
    return x_TM * torch.empty_like(x_TM).uniform_(1 - jitter, 1 + jitter)


def _scores(logits_TE, call, pad_mask_T) -> Scores:
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    std = _noise_std(call)
    noisy_TE = logits_TE + std * torch.randn_like(logits_TE) if std > 0 else logits_TE
    score_TE = noisy_TE
    if call.config.score_function == "sigmoid":
        # its softmax is sigmoid(z) over the sum of sigmoids
        score_TE = torch.nn.functional.logsigmoid(noisy_TE)
    return Scores(logits_TE, noisy_TE, score_TE, pad_mask_T)


def _noise_std(call) -> float:
    return call.config.gate_noise / call.config.num_experts if call.training else 0.0


def select_top_k(
    scores: Scores, call: RouterCall, load_bias_E: torch.Tensor | None
) -> tuple[Selection, torch.Tensor | None]:
    """Return the K best experts, and the counts for ``load_bias="quantile"`` in training, or None.

    ``sampling`` adds Gumbel noise for choices after the first. The load bias ``load_bias_E``, fp32
    [E], and the limit to groups of experts act on the selection only, not on gate values.
    """
    config, score_TE = call.config, scores.score_TE
    gumbel_TE = key_TE = bias_counts = None
    needs_margins = call.training and config.load_bias == "quantile"
    num_fallbacks = config.overflow_rerouting if call.capacity is not None else 0
    num_choices = min(config.top_k + max(num_fallbacks, needs_margins), config.num_outputs)
    if _second_by(call, "sampling"):
        gumbel_TE = -torch.empty_like(score_TE).exponential_().log()
    if load_bias_E is not None or config.num_expert_groups > 1:
        key_TE = _selection_key(score_TE, config, load_bias_E)
    selecting_TE, steering, given_TK = key_TE, call.steering, None
    if steering is not None and steering.given_TK is not None:
        steering.taken, given_TK = True, decode(steering.given_TK)
        others_TE = score_TE.detach() if key_TE is None else key_TE
        others_TE = others_TE if gumbel_TE is None else others_TE + gumbel_TE
        selecting_TE, gumbel_TE = key_of_given(given_TK, others_TE), None
    pad_T = scores.pad_T
    mask_T = pad_T if config.balance_over == "unpadded" else None
    inputs = {"noise_TE": gumbel_TE, "pad_T": mask_T, "key_TE": selecting_TE}
    found = Selection(*ops.topk_gating(score_TE, num_choices, **inputs, sums=call.reports))
    if pad_T is not None and mask_T is None:  # padding counts
        all_TK = found.expert_TK[:, : config.top_k]
        masked_TK = found.expert_TK.masked_fill(pad_T[:, None], -1)
        found = found._replace(expert_TK=masked_TK, all_TK=all_TK)
    if config.score_function == "sigmoid":  # the softmax times the sum of the sigmoids
        found = found._replace(gate_TK=found.gate_TK * found.lse_T.exp()[:, None])
    if needs_margins and key_TE is not None:
        next_T = found.expert_TK[:, config.top_k]
        bias_counts = margin_histogram(key_TE, next_T, config.top_k, pad_T)
    split = _split(found, config.top_k, num_fallbacks)
    if given_TK is not None:
        expert_TK, gate_TK = in_given_places(given_TK, split.expert_TK, split.gate_TK)
        split = split._replace(expert_TK=expert_TK, gate_TK=gate_TK)
    return split, bias_counts


def _selection_key(score_TE, config, load_bias_E) -> torch.Tensor:
    """Return logits or sigmoids, with the load bias and the limit to groups; no gradient."""
    key_TE = score_TE.detach()
    if config.score_function == "sigmoid":
        key_TE = key_TE.exp()  # scores are their logarithms
    if load_bias_E is not None:
        key_TE = key_TE + load_bias_E
    return limit_to_groups(key_TE, config) if config.num_expert_groups > 1 else key_TE


def _split(found: Selection, top_k: int, num_fallbacks: int) -> Selection:
    """Separate the K choices from the fallbacks."""
    expert_TC, gate_TC = found.expert_TK, found.gate_TK
    if expert_TC.shape[1] == top_k:
        return found
    others = slice(top_k, top_k + num_fallbacks)
    return found._replace(
        expert_TK=expert_TC[:, :top_k].contiguous(),
        gate_TK=gate_TC[:, :top_k],
        fallback=(expert_TC[:, others], gate_TC[:, others]) if num_fallbacks else None,
    )


def _without_null_experts(chosen, call) -> tuple[Selection, torch.Tensor | None]:
    """Return the choices of real experts, and int32 pairs by choice and null expert, or None."""
    num_experts, num_null = call.config.num_experts, call.config.null_experts
    if not num_null:
        return chosen, None
    expert_TK, fallback = chosen.expert_TK, chosen.fallback
    if fallback is not None:
        fallback = torch.where(fallback[0] < num_experts, fallback[0], -1), fallback[1]
    of_experts = torch.where(expert_TK < num_experts, expert_TK, -1)
    num_null_KN = count_pairs((expert_TK - num_experts).clamp(min=-1), num_null)
    return chosen._replace(expert_TK=of_experts, fallback=fallback), num_null_KN


def _assign_rows(
    chosen: Selection, call: RouterCall, score_TE: torch.Tensor
) -> tuple[Routing, torch.Tensor | None]:
    """Return the routing, and which choices were rejected, bool [T, K]; None: none can be."""
    steering = call.steering
    if steering is not None and steering.weight_TK is not None:
        chosen = chosen._replace(gate_TK=steering.weight_TK)
        as_given = {"unnormalized_weights": True, "normalize_before_dropping": False}
        config = dataclasses.replace(call.config, route_scale=1.0, **as_given)
        call = dataclasses.replace(call, config=config)
    config = call.config
    # Meta's rule: divide softmax values by their sum, at least epsilon
    divides = config.score_function == "softmax" and not config.null_experts
    log_gate_TE = None if divides else score_TE
    expert_TK, gate_TK, fallback = chosen.expert_TK, chosen.gate_TK, chosen.fallback
    priority = None
    if config.batch_prioritized:
        priority = gate_TK.detach()[:, 0]
    elif config.drop_policy == "probability":
        priority = gate_TK.detach()
    elif config.drop_policy == "random" and call.training:
        priority = torch.rand_like(gate_TK[:, 0])
    if config.normalize_before_dropping and config.top_k > 1:
        gate_TK, fallback = _normalize(expert_TK, gate_TK, fallback, log_gate_TE)
    rejected_TK = None
    if _second_by(call, "random"):  # unless K * gate exceeds a uniform draw
        rejected_TK = ~(config.top_k * gate_TK.detach() > torch.rand_like(gate_TK))
        rejected_TK[:, 0] = False
    if steering is not None and steering.given_TK is not None:  # after the draw: a replay draws too
        rejected_TK = steering.given_TK < -1
    if rejected_TK is not None:
        rejected_TK = rejected_TK & (expert_TK >= 0)
        expert_TK = torch.where(rejected_TK, -1, expert_TK)
    routing = build_routing(
        expert_TK, gate_TK, call, priority=priority, fallback=fallback, log_gate_TE=log_gate_TE
    )
    return routing, rejected_TK


def _normalize(expert_TK, gate_TK, fallback, log_gate_TE):
    """Divide the gate values of choices and fallbacks by the sum over the K choices."""
    if log_gate_TE is None:
        total_T1 = gate_TK.sum(1, keepdim=True).clamp(min=torch.finfo(gate_TK.dtype).eps)
        gate_TK = gate_TK / total_T1
    else:
        gate_TK, total_T1 = share_of_gates(log_gate_TE, expert_TK, expert_TK >= 0)
    if fallback is None:
        return gate_TK, None
    others_TR, gate_TR = fallback
    if log_gate_TE is None:
        return gate_TK, (others_TR, gate_TR / total_T1)
    log_TR = log_gate_TE.gather(1, others_TR.clamp(min=0).long())
    return gate_TK, (others_TR, (log_TR - total_T1).exp())


def _count_tokens(scores, chosen, balanced_KE, call) -> Counted:
    """Return the tokens over which losses are means, by ``balance_over``, and their choices."""
    choices = call.config.balance_choices_counted
    pairs_E = balanced_KE[:choices].sum(0) if choices > 1 else balanced_KE[0]
    if scores.pad_T is None or call.config.balance_over != "unpadded":
        return Counted(None, len(scores.score_TE), chosen.prob_sum_E, pairs_E, choices)
    live_T = ~scores.pad_T
    prob_TE = torch.where(live_T[:, None], scores.score_TE.softmax(1), 0)
    num_live = live_T.sum(dtype=prob_TE.dtype)  # an integer divisor would give fp32
    return Counted(live_T, num_live, prob_TE.sum(0), pairs_E, choices)


def _for_all_ranks(counted, call) -> tuple[torch.Tensor, torch.Tensor] | tuple[()]:
    """Return ``mean_prob_E`` and ``balance_counts`` of :class:`RouterAux`, if they are needed."""
    if not (call.training and call.config.balances_over_ranks):
        return ()
    pairs_E = counted.pairs_E.to(torch.int64)
    all_pairs = (pairs_E.new_ones(1) * counted.choices * counted.num_tokens).to(torch.int64)
    mean_prob_E = counted.prob_sum_E / losses.at_least_1(counted.num_tokens)
    return mean_prob_E, torch.cat([pairs_E, all_pairs])


def _router_loss(scores, chosen, counted, call) -> torch.Tensor:
    """Return the balance loss that the options ask for plus the weighted z-loss, fp32 scalar.

    The balance loss is left out if it needs the counts of all ranks.
    """
    config, noisy_TE = call.config, scores.noisy_TE
    if config.load_importance_loss and call.training:
        prob_TE = torch.exp(noisy_TE - chosen.lse_T[:, None])
        # with gradient: the token's other logits move the threshold
        last_T = chosen.expert_TK[:, -1:].clamp(min=0).long()
        threshold_T = noisy_TE.gather(1, last_T)[:, 0]
        loss = losses.load_importance_loss(
            prob_TE, scores.logits_TE, threshold_T, _noise_std(call), scores.pad_T
        )
    elif config.balance_scope == "sequence":
        prob_TE = torch.exp(scores.score_TE - chosen.lse_T[:, None])
        expert_TK = chosen.expert_TK[:, : counted.choices]
        loss = losses.sequence_balance_loss(prob_TE, expert_TK, call.num_sequences, counted.live_T)
    elif config.balances_over_ranks and call.training:
        loss = chosen.prob_sum_E.new_zeros(())
    else:
        prob_sum_E, num_tokens = counted.prob_sum_E, counted.num_tokens
        if num_fillers := call.num_fillers(len(noisy_TE)):  # uniform probabilities
            prob_sum_E = prob_sum_E + num_fillers / config.num_outputs
            num_tokens = num_tokens + num_fillers
        loss = losses.balance_loss(prob_sum_E, counted.pairs_E, num_tokens, counted.choices)
    if config.z_loss_weight > 0:
        lse_T = chosen.lse_T if scores.score_TE is noisy_TE else noisy_TE.logsumexp(1)
        if counted.live_T is not None:
            lse_T = torch.where(counted.live_T, lse_T, 0)
        loss = loss + config.z_loss_weight * losses.z_loss(lse_T, counted.num_tokens)
    return loss


def _second_by(call, name) -> bool:
    """Return whether this policy decides about choices after the first in this call."""
    config = call.config
    return call.training and config.top_k > 1 and config.second_expert_policy == name
