"""Gating in plain torch.

Source: GShard (Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1), for any K.
"""

import torch
from torch import Tensor


def _select(score_TE: Tensor, first_T1: Tensor, top_k: int) -> Tensor:
    """Return the first choice and the largest other scores, (T, K) int64; overwrites the scores.

    Ties go to the lowest index, which torch.topk does not promise. Sorting each row takes longer.
    """
    choices = [first_T1]
    while len(choices) < top_k:
        score_TE.scatter_(1, choices[-1], float("-inf"))
        choices.append(score_TE.argmax(dim=1, keepdim=True))
    return torch.cat(choices, dim=1)


def topk_gating_fwd(
    logits_TE: Tensor,
    top_k: int,
    *,
    noise_TE: Tensor | None = None,
    pad_T: Tensor | None = None,
    key_TE: Tensor | None = None,
    sums: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of :func:`fairseq_tutel.ops.topk_gating`, and one more.

    The last result has the chosen experts of padded rows too, (T, K) int32, or (0, K) without
    ``pad_T``.
    """
    # A finite floor keeps experts that the caller disabled with -inf apart from those that
    # _select has taken, and makes a row of them uniform.
    score_TE = logits_TE.clamp(min=torch.finfo(logits_TE.dtype).min)
    # Spelled out: torch.softmax is slow over few experts, and lse is needed anyway.
    top_T1 = score_TE.amax(dim=1, keepdim=True)
    prob_TE = (score_TE - top_T1).exp_()
    total_T1 = prob_TE.sum(dim=1, keepdim=True)
    prob_TE /= total_T1
    lse_T1 = top_T1 + total_T1.log()
    prob_sum_E, entropy_sum = prob_TE.new_empty(0), prob_TE.new_empty(0)
    if sums:
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


def topk_gating_bwd(
    d_gate_TK: Tensor | None,
    d_prob_sum_E: Tensor | None,
    d_lse_T: Tensor | None,
    logits_TE: Tensor,
    lse_T: Tensor,
    choice_TK: Tensor,
) -> Tensor:
    """Return the gradient of the logits, (T, E); None for d_* means no gradient.

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


def scaled_dot_fwd(a_E: Tensor, b_E: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``scale * <a, b>``, a scalar in a's dtype, and its gradient by a, (E,)."""
    # a tensor in the product's dtype: a number would be rounded to torch's default dtype first
    weight_E = b_E * torch.tensor(scale, dtype=a_E.dtype, device="cpu")
    return torch.dot(a_E, weight_E), weight_E
