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
from ..load_bias import margin_histogram
from ..metrics import RouterAux
from ..routing import RouterStep, Routing, build_routing, normalize_gates


class Selection(NamedTuple):
    """The experts of each token, and what losses and metrics need of all probabilities.

    Attributes:
        expert_TK: int32 [T, K], best first; -1 for padding.
        gate_TK: fp32 [T, K], scores of these experts; differentiable.
        prob_sum_E: fp32 [E], sum of the probabilities over all T tokens; differentiable.
        entropy_sum: fp32 scalar, sum over tokens of the entropy in nats.
        lse_T: fp32 [T], logsumexp of the logits; differentiable.
    """

    expert_TK: torch.Tensor
    gate_TK: torch.Tensor
    prob_sum_E: torch.Tensor
    entropy_sum: torch.Tensor
    lse_T: torch.Tensor


def route_logits(
    logits_TE: torch.Tensor,
    step: RouterStep,
    pad_mask_T: torch.Tensor | None = None,
    load_bias_E: torch.Tensor | None = None,
) -> tuple[Routing, RouterAux]:
    """From logits to a routing and its losses, by scores and the K best.

    Args:
        logits_TE: [T, E], with gradient. Half logits are cast to fp32 first: their softmax and
            losses are never computed in half.
        step: what holds for this call.
        pad_mask_T: bool [T], True for padding; looked at only with ``use_pad_mask``.
        load_bias_E: fp32 [E], the router's ``load_bias``; None without that option.

    Raises:
        ValueError: logits for another number of experts, or a load bias is asked for and not given.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if logits_TE.shape[1] != step.config.num_experts:
        raise ValueError(
            f"the gate gave logits for {logits_TE.shape[1]} experts, the layer has "
            f"{step.config.num_experts}"
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
    routing = assign_rows(chosen, step)
    if step.training and step.config.load_bias == "sign":
        bias_counts = routing.num_routed_KE.sum(0, dtype=torch.int32)
    balance_later = step.training and step.config.balance_scope == "global"
    return routing, RouterAux(
        prob_sum_E=chosen.prob_sum_E if balance_later else None,
        bias_counts=bias_counts,
        loss=router_loss(logits_TE, noisy_TE, score_TE, chosen, routing, step, pad_mask_T),
        entropy_sum=chosen.entropy_sum.detach(),
        num_chosen_KE=count_chosen(chosen, routing, step),
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
    num_choices = top_k = config.top_k
    counted = step.training and config.load_bias == "quantile"
    if _policy(step, "sampling"):
        gumbel_TE = -torch.empty_like(score_TE).exponential_().log()
    if load_bias_E is not None:
        key_TE = score_TE.detach()
        key_TE = (key_TE.exp() if config.score_function == "sigmoid" else key_TE) + load_bias_E
        num_choices += counted
    found = Selection(
        *ops.topk_gating(score_TE, num_choices, noise_TE=gumbel_TE, pad_T=pad_mask_T, key_TE=key_TE)
    )
    bias_counts = None
    if counted:
        bias_counts = margin_histogram(key_TE, found.expert_TK[:, top_k], pad_mask_T)
        found = found._replace(
            expert_TK=found.expert_TK[:, :top_k].contiguous(), gate_TK=found.gate_TK[:, :top_k]
        )
    if config.score_function == "sigmoid":
        found = found._replace(gate_TK=found.gate_TK * found.lse_T.exp()[:, None])
    return found, bias_counts


def assign_rows(chosen: Selection, step: RouterStep) -> Routing:
    """Rejection by ``random``, order by ``batch_prioritized``, rows, capacity, weights."""
    expert_TK, gate_TK = chosen.expert_TK, chosen.gate_TK
    priority_T = gate_TK.detach()[:, 0] if step.config.batch_prioritized else None
    if step.config.normalize_before_dropping and step.config.top_k > 1:
        gate_TK = normalize_gates(gate_TK)
    if _policy(step, "random"):
        expert_TK = reject_at_random(expert_TK, gate_TK.detach())
    return build_routing(expert_TK, gate_TK, step, priority_T=priority_T)


def reject_at_random(expert_TK: torch.Tensor, gate_TK: torch.Tensor) -> torch.Tensor:
    """Drop choice j > 1 unless ``K * gate_j`` exceeds a uniform draw; first choices stay."""
    keep_TK = gate_TK.shape[1] * gate_TK > torch.rand_like(gate_TK)
    keep_TK[:, 0] = True
    return torch.where(keep_TK, expert_TK, -1)


def count_chosen(chosen: Selection, routing: Routing, step: RouterStep) -> torch.Tensor:
    """int32 [K, E], tokens by choice and expert before rejection, for the metrics."""
    if not _policy(step, "random"):
        return routing.num_routed_KE
    top_k, bins = step.config.top_k, step.config.num_experts + 1  # the first one for padding
    device = chosen.expert_TK.device
    bin_TK = chosen.expert_TK.long() + 1 + bins * torch.arange(top_k, device=device)
    counts = torch.zeros(top_k * bins, dtype=torch.int32, device=device)
    # integers: deterministic; and, unlike bincount, needs no synchronisation
    counts.scatter_add_(0, bin_TK.flatten(), torch.ones_like(bin_TK.flatten(), dtype=torch.int32))
    return counts.view(top_k, bins)[:, 1:]


def router_loss(
    logits_TE: torch.Tensor,
    noisy_TE: torch.Tensor,
    score_TE: torch.Tensor,
    chosen: Selection,
    routing: Routing,
    step: RouterStep,
    pad_mask_T: torch.Tensor | None,
) -> torch.Tensor:
    """The balance loss that the options ask for, with the weighted z-loss; fp32 scalar.

    Without the balance loss where that needs the counts of all ranks.

    Args:
        logits_TE, noisy_TE: before and after noise.
        score_TE: the noisy logits, or for the sigmoid what :func:`select_top_k` was given.
        chosen, routing: made of these.
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
        chosen_E = (
            routing.num_routed_KE[:choices].sum(0) if choices > 1 else routing.num_routed_KE[0]
        )
        loss = losses.balance_loss(chosen.prob_sum_E, chosen_E, num_tokens, choices)
    if config.z_loss_weight > 0:
        lse_T = chosen.lse_T if score_TE is noisy_TE else noisy_TE.logsumexp(1)
        loss = loss + config.z_loss_weight * losses.z_loss(lse_T)
    return loss


def _policy(step, name):
    """Whether choices after the first are made by this policy."""
    config = step.config
    return step.training and config.top_k > 1 and config.second_expert_policy == name
