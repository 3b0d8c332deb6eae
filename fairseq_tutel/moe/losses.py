"""Auxiliary losses of a router as pure functions, each computed from this rank's tokens alone."""

import torch

from .. import ops


def balance_loss(
    prob_sum_E: torch.Tensor,
    chosen_E: torch.Tensor,
    num_tokens: int | torch.Tensor,
    choices: int = 1,
) -> torch.Tensor:
    """GShard's balance loss, ``E * sum_e mean_t(p_te) * mean_t(first choice is e)``.

    arXiv 2006.16668, section 2.2, scaled so that perfect balance gives 1; before dropping.
    ``prob_sum_E``, fp32, is the sum over tokens of the gate's probabilities, with gradient;
    ``chosen_E``, int, the tokens whose first choice is e, or all ``choices`` of a token, as in
    ST-MoE (arXiv 2202.08906).
    """
    scale = prob_sum_E.shape[0] / at_least_1(num_tokens) ** 2 / choices
    if isinstance(scale, torch.Tensor):
        return torch.dot(prob_sum_E, chosen_E * scale)
    return ops.scaled_dot(prob_sum_E, chosen_E, scale)


def sequence_balance_loss(
    prob_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    num_sequences: int,
    live_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Balance loss within sequences, mean over them (DeepSeek-V3, arXiv 2412.19437, eq. 17-20).

    ``prob_TE``, fp32, is the gate's distribution with gradient, of B sequences of T / B tokens;
    ``expert_TK``, int32, the choices that count, -1 for none; ``live_T``, bool, the tokens that
    count (default None: all). Sequences without one do not count.
    """
    (num_tokens, num_experts), choices = prob_TE.shape, expert_TK.shape[1]
    length = num_tokens // max(num_sequences, 1)
    if live_T is not None:
        prob_TE = torch.where(live_T[:, None], prob_TE, 0)
    prob_BE = prob_TE.view(num_sequences, length, num_experts).sum(1)
    bins = expert_TK.view(num_sequences, length * choices).long() + 1  # the first one for none
    chosen_BE = prob_BE.new_zeros((num_sequences, num_experts + 1))
    chosen_BE.scatter_add_(1, bins, torch.ones_like(bins, dtype=prob_BE.dtype))
    if live_T is None:
        scale = num_experts / max(num_sequences * length**2 * choices, 1)
        return (prob_BE * chosen_BE[:, 1:]).sum() * scale
    length_B = live_T.view(num_sequences, length).sum(1, dtype=prob_TE.dtype)
    loss_B = (prob_BE * chosen_BE[:, 1:]).sum(1) / at_least_1(length_B) ** 2
    return loss_B.sum() * (num_experts / choices) / at_least_1((length_B > 0).sum())


def z_loss(lse_T: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
    """Mean squared log-partition of the logits (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return lse_T.square().sum() / at_least_1(num_tokens)


def at_least_1(count: int | torch.Tensor) -> int | torch.Tensor:
    """Return the count as a divisor: 1 in place of 0."""
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def load_importance_loss(
    prob_TE: torch.Tensor,
    clean_logits_TE: torch.Tensor,
    threshold_T: torch.Tensor,
    noise_std: float,
    pad_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Half the sum of the squared coefficients of variation of importance and load.

    Shazeer et al., arXiv 1701.06538, section 4 and appendix A. The importance of an expert is the
    sum of its gate values. Its load is the expected number of tokens, each with probability
    ``Phi((clean logit - threshold) / noise_std)``; the threshold is the noisy logit of the K-th
    choice. All values are fp32 with gradient. Tokens of ``pad_T``, bool, do not count.
    """
    chosen_TE = torch.special.ndtr((clean_logits_TE - threshold_T[:, None]) / noise_std)
    if pad_T is not None:
        live_T1 = (~pad_T)[:, None]
        prob_TE, chosen_TE = prob_TE * live_T1, chosen_TE * live_T1
    return 0.5 * (_squared_variation(prob_TE.sum(0)) + _squared_variation(chosen_TE.sum(0)))


def _squared_variation(x_E: torch.Tensor) -> torch.Tensor:
    return x_E.var(unbiased=False) / x_E.mean().square().clamp(min=1e-10)
