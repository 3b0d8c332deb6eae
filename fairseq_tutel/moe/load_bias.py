"""A bias on the selection of experts that follows their load, ``load_bias``: no loss, no gradient.

Experts are selected by ``r_te = q_te + b_e``, with q the logits (softmax) or the scores (sigmoid);
gate values are without b. After every update b follows what its tokens would have needed, in
integers that ranks and micro-batches add up, so that it is the same to the bit on all of them:

- ``sign``: ``b_e += rate * sign(mean(c) - c_e)`` with c_e the pairs routed to e (Wang et al., arXiv
  2408.15664, eq. 3).
- ``quantile``: with a_t the (K+1)-th largest r of token t, e is chosen where ``b_e > a_t - q_te``;
  the new b_e is the K/E quantile of that over the tokens (arXiv 2607.24653, eq. 13-14), so that
  each expert would have had its even share, the others' biases as they were.

With ``load_bias_entropy`` (experimental) the bias is multiplied by the token's relative entropy:
tokens that are certain of their experts keep them, undecided ones go where there is room.

Both subtract the mean of b afterwards, which changes no selection. The quantile is read from a
histogram of the margin ``a_t - r_te``, which is how far b_e is from choosing e: bins are finest
around 0, where it ends up, and a shift of logits and bias against each other changes no margin.
"""

from __future__ import annotations

import math

import torch

BINS = 256
_SCALE = 0.01  # of the bins' width around margin 0, times 2 * _EDGE / BINS
_LEAST_ENTROPY = 0.05  # so that a certain token's need of a bias stays a number
_EDGE = math.asinh(100 / _SCALE)  # margins beyond +-100 are in the first and last bin


def margin_histogram(
    key_TE: torch.Tensor,
    next_best_T: torch.Tensor,
    pad_T: torch.Tensor | None = None,
    weight_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Histogram of ``a_t - r_te`` per expert, int32 [E, BINS].

    Args:
        key_TE: fp32 [T, E], r.
        next_best_T: int [T], the expert with the (K+1)-th largest r; any value for padding.
        pad_T: bool [T], tokens that do not count.
        weight_T: fp32 [T], > 0, what the bias is multiplied by; None: 1.
    """
    num_experts = key_TE.shape[1]
    cutoff_T1 = key_TE.gather(1, next_best_T.clamp(min=0).long()[:, None])
    margin_TE = cutoff_T1 - key_TE
    if weight_T is not None:
        margin_TE = margin_TE / weight_T[:, None]
    # -1 to 1; nan (of an overflow, of disabled experts) is no index: it counts in the last bin
    place_TE = (torch.asinh(margin_TE / _SCALE) / _EDGE).nan_to_num(nan=1.0)
    bin_TE = ((place_TE + 1) * (BINS / 2)).clamp(0, BINS - 1).long()
    bin_TE += BINS * torch.arange(num_experts, device=key_TE.device)
    if pad_T is not None:
        bin_TE.masked_fill_(pad_T[:, None], num_experts * BINS)
    counts = torch.zeros(num_experts * BINS + 1, dtype=torch.int32, device=key_TE.device)
    # integers: deterministic; and, unlike bincount, needs no synchronisation
    counts.scatter_add_(0, bin_TE.flatten(), torch.ones_like(bin_TE, dtype=torch.int32).flatten())
    return counts[:-1].view(num_experts, BINS)


def relative_entropy(score_TE: torch.Tensor) -> torch.Tensor:
    """Entropy of each token's distribution over that of an even one, [T], 0.05 to 1.

    Args:
        score_TE: fp32 [T, E], of which the softmax is the distribution.
    """
    entropy_T = torch.special.entr(score_TE.softmax(1)).sum(1)
    return (entropy_T / math.log(score_TE.shape[1])).clamp(_LEAST_ENTROPY, 1)


@torch.no_grad()
def quantile_bias(bias_E: torch.Tensor, counts_EB: torch.Tensor, top_k: int) -> torch.Tensor:
    """The new bias from the histogram of an update's margins, fp64 [E].

    Linear between the edges of a bin. Without tokens the bias stays as it is.
    """
    counts_EB = counts_EB.to(torch.int64)
    num_experts, bins = counts_EB.shape
    below_EB = counts_EB.cumsum(1)
    wanted_E1 = below_EB[:, -1:].double() * (top_k / num_experts)
    bin_E1 = (below_EB < wanted_E1).sum(1, keepdim=True).clamp(max=bins - 1)
    inside_E1 = counts_EB.gather(1, bin_E1)
    before_E1 = below_EB.gather(1, bin_E1) - inside_E1
    place_E1 = bin_E1 + (wanted_E1 - before_E1) / inside_E1.clamp(min=1)
    margin_E1 = _SCALE * torch.sinh((place_E1 * (2 / bins) - 1) * _EDGE)
    moved_E = bias_E.double() + torch.where(below_EB[:, -1:] > 0, margin_E1, 0.0)[:, 0]
    return moved_E - moved_E.mean()


@torch.no_grad()
def sign_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, rate: float) -> torch.Tensor:
    """The new bias from the pairs that were routed to each expert in an update, fp64 [E]."""
    counts_E = counts_E.double()
    moved_E = bias_E.double() + rate * torch.sign(counts_E.mean() - counts_E)
    return moved_E - moved_E.mean()
