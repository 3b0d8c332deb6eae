"""First stage of routing: scores, and the K best experts of each token."""

from typing import NamedTuple

import torch

from ... import ops
from ..given_choices import in_given_places, key_of_given
from ..load_bias import margin_histogram
from ..routing import RouterCall
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


def scores_of(logits_TE: torch.Tensor, call: RouterCall, pad_mask_T: torch.Tensor | None) -> Scores:
    """Return the scores of logits: noise in training, and the score function."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    std = noise_std(call)
    noisy_TE = logits_TE + std * torch.randn_like(logits_TE) if std > 0 else logits_TE
    score_TE = noisy_TE
    if call.config.score_function == "sigmoid":
        # its softmax is sigmoid(z) over the sum of sigmoids
        score_TE = torch.nn.functional.logsigmoid(noisy_TE)
    return Scores(logits_TE, noisy_TE, score_TE, pad_mask_T)


def noise_std(call: RouterCall) -> float:
    """Return the standard deviation of the logits' noise in this call."""
    return call.config.gate_noise / call.config.num_experts if call.training else 0.0


def second_by(call: RouterCall, name: str) -> bool:
    """Return whether this policy decides about choices after the first in this call."""
    config = call.config
    return call.training and config.top_k > 1 and config.second_expert_policy == name


def select_top_k(
    scores: Scores, call: RouterCall, load_bias_E: torch.Tensor | None
) -> tuple[Selection, torch.Tensor | None]:
    """Return the K best experts, and the counts for ``load_bias="quantile"`` in training, or None.

    ``sampling`` adds Gumbel noise for choices after the first. The load bias ``load_bias_E``, fp32
    [E], and the limit to groups of experts act on the selection only, not on gate values.
    """
    config, score_TE, pad_T = call.config, scores.score_TE, scores.pad_T
    key_TE = gumbel_TE = None
    if load_bias_E is not None or config.num_expert_groups > 1:
        key_TE = _selection_key(score_TE, config, load_bias_E)
    if second_by(call, "sampling"):
        gumbel_TE = -torch.empty_like(score_TE).exponential_().log()
    needs_margins = call.training and config.load_bias == "quantile"
    num_fallbacks = config.overflow_rerouting if call.capacity is not None else 0
    num_choices = min(config.top_k + max(num_fallbacks, needs_margins), config.num_outputs)
    given_TK = None if call.steering is None else call.steering.take()
    by = key_TE, gumbel_TE
    if given_TK is not None:
        by = key_of_given(given_TK, score_TE, *by), None
    found = _best(scores, call, num_choices, *by)
    bias_counts = None
    if needs_margins and key_TE is not None:
        next_T = found.expert_TK[:, config.top_k]
        bias_counts = margin_histogram(key_TE, next_T, config.top_k, call.uncounted(pad_T))
    split = _split(found, config.top_k, num_fallbacks)
    if given_TK is not None:
        expert_TK, gate_TK = in_given_places(given_TK, split.expert_TK, split.gate_TK)
        split = split._replace(expert_TK=expert_TK, gate_TK=gate_TK)
    return split, bias_counts


def _best(scores, call, num_choices, key_TE, gumbel_TE) -> Selection:
    """Return the experts with the largest keys (None: scores), plus noise after the first choice.

    Padding chooses nothing; with ``balance_over`` other than ``unpadded`` its choices count.
    """
    config, pad_T = call.config, scores.pad_T
    mask_T = pad_T if config.balance_over == "unpadded" else None
    by = {"noise_TE": gumbel_TE, "pad_T": mask_T, "key_TE": key_TE}
    found = Selection(*ops.topk_gating(scores.score_TE, num_choices, **by, sums=call.reports))
    if pad_T is not None and mask_T is None:
        all_TK = found.expert_TK[:, : config.top_k]
        masked_TK = found.expert_TK.masked_fill(pad_T[:, None], -1)
        found = found._replace(expert_TK=masked_TK, all_TK=all_TK)
    if config.score_function == "sigmoid":  # the softmax times the sum of the sigmoids
        found = found._replace(gate_TK=found.gate_TK * found.lse_T.exp()[:, None])
    return found


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
