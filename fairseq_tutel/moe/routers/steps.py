"""The steps that routers share, each a function of tensors and the step's options.

Numerics follow fairseq's ``moe`` branch (top1gate.py, top2gate.py) for K = 1 and 2; larger K
extends its top-2 rules. Where those are wrong these functions do the right thing:

- fp32 gating there casts logits that a half-precision product has already rounded. Here half inputs
  are multiplied with fp32 accumulation and fp32 output.
- There, padding and rejected second choices get location 0 and overwrite the first token of an
  expert. Here they get no row at all, and no weight.
- ``sampling`` and ``random`` draw noise in evaluation too there. Here evaluation is deterministic:
  the next best expert is taken and kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import ops
from .. import losses
from ..load_bias import margin_histogram, relative_entropy
from ..metrics import RouterAux, balanced_pairs
from ..overflow import count_pairs
from ..routing import RouterStep, Routing, build_routing, sum_of_gates


class Selection(NamedTuple):
    """The experts of each token, and what losses and metrics need of all probabilities.

    Attributes:
        expert_TK: int32 [T, K], best first; -1 for padding.
        gate_TK: fp32 [T, K], scores of these experts; differentiable.
        prob_sum_E: fp32 [E], sum of the probabilities over all T tokens; differentiable.
        entropy_sum: fp32 scalar, sum over tokens of the entropy in nats.
        lse_T: fp32 [T], logsumexp of the logits; differentiable.
        spare_expert_TR, spare_gate_TR: [T, R], the next best experts, for re-routing; or None.
    """

    expert_TK: torch.Tensor
    gate_TK: torch.Tensor
    prob_sum_E: torch.Tensor
    entropy_sum: torch.Tensor
    lse_T: torch.Tensor
    spare_expert_TR: torch.Tensor | None = None
    spare_gate_TR: torch.Tensor | None = None


def route_logits(
    logits_TE: torch.Tensor,
    step: RouterStep,
    pad_mask_T: torch.Tensor | None = None,
    load_bias_E: torch.Tensor | None = None,
) -> tuple[Routing, RouterAux]:
    """From logits to a routing and its losses, by scores and the K best.

    Args:
        logits_TE: [T, E], with N null experts [T, E + N]; with gradient. Half logits are cast to
            fp32 first: their softmax and losses are never computed in half.
        step: what holds for this call.
        pad_mask_T: bool [T], True for padding; looked at only with ``use_pad_mask``.
        load_bias_E: fp32 [E], the router's ``load_bias``; None without that option.

    Raises:
        ValueError: logits for another number of experts, or a load bias is asked for and not given.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if logits_TE.shape[1] != step.config.num_outputs:
        nulls = step.config.null_experts
        raise ValueError(
            f"the gate gave logits for {logits_TE.shape[1]} experts, the layer has "
            f"{step.config.num_experts}{f' and {nulls} null experts' if nulls else ''}"
        )
    if step.config.load_bias != "none" and load_bias_E is None:
        raise ValueError(
            f"load_bias={step.config.load_bias!r} needs a router that passes its load_bias to "
            "route_logits(), as a TopKRouter does; a plain module as gate has none"
        )
    pad_mask_T = pad_mask_T if step.config.use_pad_mask else None
    noisy_TE = add_noise(logits_TE, step)
    score_TE = noisy_TE
    if step.config.score_function == "sigmoid":
        # its softmax is sigmoid(z) divided by its sum over the experts
        score_TE = torch.nn.functional.logsigmoid(noisy_TE)
    chosen, bias_counts = select_top_k(score_TE, step, pad_mask_T, load_bias_E)
    of_experts, num_null_KN = set_nulls_aside(chosen, step)
    routing = assign_rows(of_experts, step)
    num_chosen_KE = count_chosen(of_experts, routing, step)
    balanced_KE = balanced_pairs(routing.num_routed_KE, num_chosen_KE, num_null_KN)
    if step.training and step.config.load_bias == "sign":
        bias_counts = balanced_KE.sum(0, dtype=torch.int32)
    balance_later = step.training and step.config.balance_scope == "global"
    return routing, RouterAux(
        prob_sum_E=chosen.prob_sum_E if balance_later else None,
        bias_counts=bias_counts,
        loss=router_loss(logits_TE, noisy_TE, score_TE, chosen, balanced_KE, step, pad_mask_T),
        entropy_sum=chosen.entropy_sum.detach(),
        num_chosen_KE=num_chosen_KE,
        num_null_KN=num_null_KN,
    )


def jitter_tokens(x_TM: torch.Tensor, step: RouterStep) -> torch.Tensor:
    """Multiply by uniform(1-j, 1+j) in training (Switch Transformer, section 2.2)."""
    jitter = step.config.input_jitter
    if not step.training or jitter == 0:
        return x_TM
    return x_TM * torch.empty_like(x_TM).uniform_(1 - jitter, 1 + jitter)


def noise_std(step: RouterStep) -> float:
    """Standard deviation of the noise on the logits."""
    return step.config.gate_noise / step.config.num_experts if step.training else 0.0


def add_noise(logits_TE: torch.Tensor, step: RouterStep) -> torch.Tensor:
    """Normal noise of ``gate_noise`` / E, in training."""
    std = noise_std(step)
    return logits_TE + std * torch.randn_like(logits_TE) if std > 0 else logits_TE


def select_top_k(
    score_TE: torch.Tensor,
    step: RouterStep,
    pad_mask_T: torch.Tensor | None,
    load_bias_E: torch.Tensor | None = None,
) -> tuple[Selection, torch.Tensor | None]:
    """The K best experts; ``sampling`` adds Gumbel noise for choices after the first.

    Args:
        score_TE: fp32 [T, E], of which the softmax is the distribution over the experts.
        pad_mask_T: bool [T], tokens that choose nothing, or None.
        load_bias_E: fp32 [E], added for the selection alone, to the logits or sigmoids.

    Returns:
        The selection, and the counts for ``load_bias="quantile"`` in training; else None.
    """
    config, gumbel_TE, key_TE = step.config, None, None
    counted = step.training and config.load_bias == "quantile"
    num_spare = config.overflow_rerouting if step.capacity is not None else 0
    num_choices = min(config.top_k + max(num_spare, counted), config.num_outputs)
    if _policy(step, "sampling"):
        gumbel_TE = -torch.empty_like(score_TE).exponential_().log()
    if load_bias_E is not None:
        key_TE = score_TE.detach()
        weight_T = relative_entropy(key_TE) if config.load_bias_entropy else None
        bias = load_bias_E if weight_T is None else weight_T[:, None] * load_bias_E
        key_TE = (key_TE.exp() if config.score_function == "sigmoid" else key_TE) + bias
    found = Selection(
        *ops.topk_gating(score_TE, num_choices, noise_TE=gumbel_TE, pad_T=pad_mask_T, key_TE=key_TE)
    )
    if config.score_function == "sigmoid":
        found = found._replace(gate_TK=found.gate_TK * found.lse_T.exp()[:, None])
    bias_counts = None
    if counted:
        next_T = found.expert_TK[:, config.top_k]
        bias_counts = margin_histogram(key_TE, next_T, pad_mask_T, weight_T)
    return _split(found, config.top_k, num_spare), bias_counts


def _split(found: Selection, top_k: int, num_spare: int) -> Selection:
    """Part more choices than K into those and the spare ones."""
    expert_TC, gate_TC = found.expert_TK, found.gate_TK
    if expert_TC.shape[1] == top_k:
        return found
    spare = slice(top_k, top_k + num_spare)
    return found._replace(
        expert_TK=expert_TC[:, :top_k].contiguous(),
        gate_TK=gate_TC[:, :top_k],
        spare_expert_TR=expert_TC[:, spare] if num_spare else None,
        spare_gate_TR=gate_TC[:, spare] if num_spare else None,
    )


def set_nulls_aside(chosen: Selection, step: RouterStep) -> tuple[Selection, torch.Tensor | None]:
    """The same choices without those of null experts, which are not routed.

    Returns:
        The selection, and int32 [K, N] pairs by choice and null expert; None without such experts.
    """
    num_experts, num_null = step.config.num_experts, step.config.null_experts
    if not num_null:
        return chosen, None
    expert_TK, spare_TR = chosen.expert_TK, chosen.spare_expert_TR
    null_TK = (expert_TK - num_experts).clamp(min=-1)
    of_experts = chosen._replace(
        expert_TK=torch.where(expert_TK < num_experts, expert_TK, -1),
        spare_expert_TR=None
        if spare_TR is None
        else torch.where(spare_TR < num_experts, spare_TR, -1),
    )
    return of_experts, count_pairs(null_TK, num_null)


def assign_rows(chosen: Selection, step: RouterStep) -> Routing:
    """Rejection by ``random``, order of the pairs, rows, capacity, re-routing, weights."""
    config = step.config
    expert_TK, gate_TK, spare_gate_TR = chosen.expert_TK, chosen.gate_TK, chosen.spare_gate_TR
    priority = None
    if config.batch_prioritized:
        priority = gate_TK.detach()[:, 0]
    elif config.drop_policy == "probability":
        priority = gate_TK.detach()
    elif config.drop_policy == "random" and step.training:
        priority = torch.rand_like(gate_TK[:, 0])
    if config.normalize_before_dropping and config.top_k > 1:
        total_T1 = sum_of_gates(
            torch.where(expert_TK >= 0, gate_TK, 0) if config.null_experts else gate_TK
        )
        gate_TK = gate_TK / total_T1
        spare_gate_TR = None if spare_gate_TR is None else spare_gate_TR / total_T1
    if _policy(step, "random"):
        expert_TK = reject_at_random(expert_TK, gate_TK.detach())
    return build_routing(
        expert_TK,
        gate_TK,
        step,
        priority=priority,
        spare_expert_TR=chosen.spare_expert_TR,
        spare_gate_TR=spare_gate_TR,
    )


def reject_at_random(expert_TK: torch.Tensor, gate_TK: torch.Tensor) -> torch.Tensor:
    """Drop choice j > 1 unless ``K * gate_j`` exceeds a uniform draw; first choices stay."""
    keep_TK = gate_TK.shape[1] * gate_TK > torch.rand_like(gate_TK)
    keep_TK[:, 0] = True
    return torch.where(keep_TK, expert_TK, -1)


def count_chosen(chosen: Selection, routing: Routing, step: RouterStep) -> torch.Tensor:
    """int32 [K, E], tokens by choice and expert before rejection, for the metrics."""
    if not _policy(step, "random"):
        return routing.num_routed_KE
    return count_pairs(chosen.expert_TK, step.config.num_experts)


def router_loss(
    logits_TE: torch.Tensor,
    noisy_TE: torch.Tensor,
    score_TE: torch.Tensor,
    chosen: Selection,
    balanced_KE: torch.Tensor,
    step: RouterStep,
    pad_mask_T: torch.Tensor | None,
) -> torch.Tensor:
    """The balance loss that the options ask for, with the weighted z-loss; fp32 scalar.

    Without the balance loss where that needs the counts of all ranks.

    Args:
        logits_TE, noisy_TE: before and after noise.
        score_TE: the noisy logits, or for the sigmoid what :func:`select_top_k` was given.
        chosen: made of these.
        balanced_KE: int32 [K, E + N], what :func:`~..metrics.balanced_pairs` counts.
        step, pad_mask_T: as given to :func:`route_logits`.
    """
    config, num_tokens = step.config, logits_TE.shape[0]
    if config.load_importance_loss and step.training:
        prob_TE = torch.exp(noisy_TE - chosen.lse_T[:, None])
        last_T = chosen.expert_TK[:, -1:].clamp(min=0).long()
        threshold_T = noisy_TE.detach().gather(1, last_T)[:, 0]
        loss = losses.load_importance_loss(
            prob_TE, logits_TE, threshold_T, noise_std(step), pad_mask_T
        )
    elif config.balance_scope == "sequence":
        prob_TE = torch.exp(score_TE - chosen.lse_T[:, None])
        expert_TK = chosen.expert_TK[:, : config.balance_choices_counted]
        loss = losses.sequence_balance_loss(prob_TE, expert_TK, step.num_sequences)
    elif config.balance_scope == "global" and step.training:
        loss = chosen.prob_sum_E.new_zeros(())
    else:
        choices = config.balance_choices_counted
        chosen_E = balanced_KE[:choices].sum(0) if choices > 1 else balanced_KE[0]
        loss = losses.balance_loss(chosen.prob_sum_E, chosen_E, num_tokens, choices)
    if config.z_loss_weight > 0:
        lse_T = chosen.lse_T if score_TE is noisy_TE else noisy_TE.logsumexp(1)
        loss = loss + config.z_loss_weight * losses.z_loss(lse_T)
    return loss


def _policy(step, name):
    """Whether choices after the first are made by this policy."""
    config = step.config
    return step.training and config.top_k > 1 and config.second_expert_policy == name
