"""Balance experts by a bias on their selection (``load_bias``), without a loss or a gradient.

Token t selects experts by ``r_te = q_te + b_e``: q are logits (softmax) or scores (sigmoid), b is
the load bias. Gate values do not contain b. After every update b moves by counts of the update's
tokens. Counts are integers, so their sums over ranks and micro-batches, and b, are bit-identical on
all ranks:

- ``sign``: ``b_e += rate * sign(mean(c) - c_e)`` with c_e the pairs routed to e (Wang et al., arXiv
  2408.15664, eq. 3).
- ``quantile``: with a_t the (K+1)-th largest r of token t, e is chosen if ``b_e > a_t - q_te``. The
  new b_e is the K/E quantile of ``a_t - q_te`` over the tokens (arXiv 2607.24653, eq. 13-14): each
  expert would have had its even share of all pairs if the other biases had not moved.

Both subtract the mean of b afterwards, which changes no selection. The quantile is read from a
histogram of the margin ``a_t - r_te``, which has the finest bins around 0.
"""

import logging
import math
from typing import Any

import torch

from ..backends._torch_private import version_of
from .overflow import bin_counts

logger = logging.getLogger(__name__)

BINS = 256
_STEPS_UNTIL_WARNING = 16
_SCALE = 0.01  # around margin 0 a bin is _SCALE * 2 * _EDGE / BINS wide
_EDGE = math.asinh(100 / _SCALE)  # margins beyond +-100 are in the first and last bin


def margin_histogram(
    key_TE: torch.Tensor, next_best_T: torch.Tensor, top_k: int, pad_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return per expert the histogram of ``a_t - r_te`` and the pairs, int32 [E, BINS + 1].

    ``key_TE`` is r in fp32, ``next_best_T`` int32 the expert with the (K+1)-th largest r (any value
    for padding). Tokens of ``pad_T``, bool, do not count.
    """
    num_experts = key_TE.shape[1]
    cutoff_T1 = key_TE.gather(1, next_best_T.clamp(min=0).long()[:, None])
    margin_TE = cutoff_T1 - key_TE
    # -1 to 1; nan (overflow, disabled experts) counts in the last bin
    place_TE = (torch.asinh(margin_TE / _SCALE) / _EDGE).nan_to_num(nan=1.0)
    bin_TE = ((place_TE + 1) * (BINS / 2)).clamp(0, BINS - 1).long()
    bin_TE += BINS * torch.arange(num_experts, device=key_TE.device)
    if pad_T is not None:
        bin_TE.masked_fill_(pad_T[:, None], num_experts * BINS)
    counts_EB = bin_counts(bin_TE, num_experts * BINS + 1)[:-1].view(num_experts, BINS)
    return torch.cat([counts_EB, top_k * counts_EB.sum(1, keepdim=True, dtype=torch.int32)], 1)


def zero_counts(router: Any) -> torch.Tensor:
    """Return the counts of no tokens for a router's rule, int64 [E] or [E, BINS + 1]."""
    bias_E = router.load_bias
    wide = (BINS + 1,) if router.config.load_bias == "quantile" else ()
    return torch.zeros(len(bias_E), *wide, dtype=torch.int64, device=bias_E.device)


@torch.no_grad()
def quantile_bias(bias_E: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the new bias, fp64 [E], from the sum of an update's :func:`margin_histogram`."""
    counts_EB, pairs_E1 = counts.to(torch.int64).split([BINS, 1], dim=1)
    num_experts, bins = counts_EB.shape
    below_EB = counts_EB.cumsum(1)
    wanted_E1 = pairs_E1.double() / num_experts
    bin_E1 = (below_EB < wanted_E1).sum(1, keepdim=True).clamp(max=bins - 1)
    inside_E1 = counts_EB.gather(1, bin_E1)
    before_E1 = below_EB.gather(1, bin_E1) - inside_E1
    place_E1 = bin_E1 + (wanted_E1 - before_E1) / inside_E1.clamp(min=1)
    margin_E1 = _SCALE * torch.sinh((place_E1 * (2 / bins) - 1) * _EDGE)
    moved_E = bias_E.double() + torch.where(below_EB[:, -1:] > 0, margin_E1, 0.0)[:, 0]
    return moved_E - moved_E.mean()


@torch.no_grad()
def sign_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the new bias, fp64 [E], from the pairs routed to each expert in an update."""
    counts_E = counts_E.double()
    moved_E = bias_E.double() + rate * torch.sign(counts_E.mean() - counts_E)
    return moved_E - moved_E.mean()


class UpdateWatch:
    """Warning, once, if a model trains and its load bias never moves.

    torch's version counters of the tensors tell when a step changed them.
    """

    def __init__(self):
        self._before: tuple[int, int] | None = None
        self._steps = 0  # optimizer steps in which the bias did not move

    def look(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Compare versions; called in every forward pass of training, with a router's weight."""
        now = version_of(weight), version_of(bias)
        (weight_before, bias_before), self._before = self._before or now, now
        if self._steps == _STEPS_UNTIL_WARNING or weight_before == now[0]:
            return
        # stop watching once the bias moves
        self._steps = self._steps + 1 if bias_before == now[1] else _STEPS_UNTIL_WARNING
        if self._steps == _STEPS_UNTIL_WARNING and bias_before == now[1]:
            logger.warning(
                "the load bias of an MoELayer has not moved in %d training steps: call "
                "fairseq_tutel.training.update_load_bias(model, [aux, ...]) after each step",
                self._steps,
            )
