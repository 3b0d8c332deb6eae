"""Third stage of routing: losses and counts."""

import math
from typing import NamedTuple

import torch

from .. import losses
from ..overflow import count_pairs
from ..reports import RouterAux
from ..routing import RouterCall, Routing, with_real_counts
from .null_experts import without_null_experts
from .select import Scores, Selection, noise_std, second_by


class Counted(NamedTuple):
    """Tokens over which losses are means; E includes null experts."""

    live_T: torch.Tensor | None  # bool, these tokens; None: all
    num_tokens: int | torch.Tensor  # a tensor has the dtype of the probabilities
    prob_sum_E: torch.Tensor  # fp32, sum of the probabilities; differentiable
    pairs_E: torch.Tensor  # int, how often the tokens chose each expert
    choices: int  # choices of a token that pairs_E counts


def make_report(
    scores: Scores,
    chosen: Selection,
    of_experts: Selection,
    routing: Routing,
    call: RouterCall,
    num_null_KN: torch.Tensor | None,
    bias_counts: torch.Tensor | None,
) -> RouterAux:
    """Return losses and counts. ``of_experts`` is ``chosen`` without choices of null experts."""
    config, num_fillers = call.config, call.num_fillers(len(scores.score_TE))
    routing = with_real_counts(routing, call)
    if call.uncounted_T is not None:
        scores, chosen, of_experts, num_null_KN = _only_counted(scores, chosen, of_experts, call)
    num_chosen_KE = routing.num_routed_KE
    if second_by(call, "random"):  # also choices that it rejects
        num_chosen_KE = count_pairs(of_experts.expert_TK, config.num_experts)
    balanced_KE = num_chosen_KE
    if num_null_KN is not None:
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
    tokens = _count_tokens(scores, chosen, balanced_KE, call)
    return RouterAux(
        _router_loss(scores, chosen, tokens, call),
        entropy_sum,
        num_chosen_KE,
        *_for_all_ranks(tokens, call),
        bias_counts=bias_counts,
        num_null_KN=num_null_KN,
        num_fillers=num_fillers,
    )


def _only_counted(scores, chosen, of_experts, call):
    """Return scores, choices and null experts' pairs without tokens that do not count."""
    off_T = call.uncounted_T
    entropy_T = torch.special.entr(scores.score_TE.softmax(1)).sum(1)
    chosen, of_experts = (
        each._replace(expert_TK=each.expert_TK.masked_fill(off_T[:, None], -1))
        for each in (chosen, of_experts)
    )
    pad_T = call.uncounted(scores.pad_T)
    chosen = chosen._replace(entropy_sum=entropy_T.masked_fill(pad_T, 0).sum())
    _, num_null_KN = without_null_experts(chosen, call)
    return scores._replace(pad_T=pad_T), chosen, of_experts, num_null_KN


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
            prob_TE, scores.logits_TE, threshold_T, noise_std(call), scores.pad_T
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
