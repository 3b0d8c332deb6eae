"""Gating in plain torch.

Source: GShard (Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1), for any K.
"""

import torch
from torch import Tensor

from ._threads import small_on_one_thread

# Up to this K, repeated argmax is cheaper than sorting every row.
_MAX_ARGMAX_ROUNDS = 4


def _select(score_TE: Tensor, first_T1: Tensor, top_k: int) -> Tensor:
    """The first choice and the largest other scores, (T, K) int64; overwrites the scores."""
    if top_k == 1:
        return first_T1
    score_TE.scatter_(1, first_T1, float("-inf"))
    if top_k > _MAX_ARGMAX_ROUNDS:
        # A stable sort gives ties to the lowest index, which torch.topk does not promise.
        order_TE = score_TE.sort(dim=1, descending=True, stable=True).indices
        return torch.cat([first_T1, order_TE[:, : top_k - 1]], dim=1)
    choices = [first_T1]
    while len(choices) < top_k:
        choices.append(score_TE.argmax(dim=1, keepdim=True))
        if len(choices) < top_k:
            score_TE.scatter_(1, choices[-1], float("-inf"))
    return torch.cat(choices, dim=1)


@small_on_one_thread
def topk_gating_fwd(
    logits_TE: Tensor,
    top_k: int,
    *,
    noise_TE: Tensor | None = None,
    pad_T: Tensor | None = None,
    key_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Softmax, top-k, gate values and the sums that losses and metrics need.

    Args:
        logits_TE: (T, E) router logits.
        top_k: number of experts per token, 1 <= top_k <= E.
        noise_TE: (T, E) added to the logits when choices after the first are selected.
        pad_T: (T,) bool, True where the token is padding.
        key_TE: (T, E) by which experts are selected in place of the logits.

    Returns:
        expert_TK (T, K) int32, -1 in padded rows; gate_TK (T, K) softmax values at the chosen
        experts; prob_sum_E (E,) sums of the softmax over all rows; entropy_sum () in nats;
        lse_T (T,) logsumexp of the logits; choice_TK (T, K) int32, the chosen experts of padded
        rows too (shape (0, K) without ``pad_T``, where expert_TK holds the same).
    """
    # A finite floor keeps experts that the caller disabled with -inf apart from those that
    # _select has taken, and makes a row of them uniform.
    score_TE = logits_TE.clamp(min=torch.finfo(logits_TE.dtype).min)
    # Spelled out, since torch.softmax is slow over few experts, and lse comes along.
    top_T1 = score_TE.amax(dim=1, keepdim=True)
    prob_TE = (score_TE - top_T1).exp_()
    total_T1 = prob_TE.sum(dim=1, keepdim=True)
    prob_TE /= total_T1
    lse_T1 = top_T1 + total_T1.log()
    # A probability of 0 contributes 0, also where the difference overflows; NaN shows.
    entropy_sum = (lse_T1 - score_TE).mul_(prob_TE).masked_fill_(prob_TE == 0, 0).sum()
    prob_sum_E = prob_TE.sum(dim=0)
    if noise_TE is not None:
        score_TE += noise_TE
    if key_TE is None:
        first_T1 = prob_TE.argmax(dim=1, keepdim=True)
    else:
        score_TE = key_TE.clamp(min=torch.finfo(key_TE.dtype).min)
        first_T1 = score_TE.argmax(dim=1, keepdim=True)
    choice_TK = _select(score_TE, first_T1, top_k)
    gate_TK = prob_TE.gather(1, choice_TK)
    lse_T = lse_T1.squeeze(1)
    expert_TK = choice_TK.to(torch.int32)
    if pad_T is None:
        empty = expert_TK.new_empty((0, top_k))
        return expert_TK, gate_TK, prob_sum_E, entropy_sum, lse_T, empty
    masked_TK = expert_TK.masked_fill(pad_T[:, None], -1)
    return masked_TK, gate_TK, prob_sum_E, entropy_sum, lse_T, expert_TK


@small_on_one_thread
def topk_gating_bwd(
    d_gate_TK: Tensor | None,
    d_prob_sum_E: Tensor | None,
    d_lse_T: Tensor | None,
    logits_TE: Tensor,
    lse_T: Tensor,
    choice_TK: Tensor,
) -> Tensor:
    """Gradient of the logits, (T, E); the arguments are those of the forward, None = no gradient.

    With g = d_prob_sum + scatter(d_gate): d_logits = p * (g - <p, g> + d_lse).
    """
    prob_TE = (logits_TE - lse_T[:, None]).exp_()
    if d_prob_sum_E is None:
        grad_TE = torch.zeros_like(prob_TE)
    else:
        grad_TE = d_prob_sum_E.expand_as(prob_TE).clone()
    if d_gate_TK is not None:
        grad_TE.scatter_add_(1, choice_TK.long(), d_gate_TK)
    inner_T1 = (prob_TE * grad_TE).sum(dim=1, keepdim=True)
    if d_lse_T is not None:
        inner_T1 -= d_lse_T[:, None]
    return grad_TE.sub_(inner_T1).mul_(prob_TE)
