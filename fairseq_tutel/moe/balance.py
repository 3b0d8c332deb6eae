"""The balance loss over the tokens of all ranks, ``balance_scope="global"``.

Each rank's loss is ``E * sum_e F_e * mean_t(p_te)``: F from the counts of all ranks, which carry no
gradient, p of its own tokens. Weighted by the ranks' tokens and summed, the gradient is that of one
process with all tokens. A balance that only the global batch must have leaves experts free to
specialise within it: Qiu et al., arXiv 2501.11873 (eq. 3), who find lower perplexity. Micro-batches
of one update are balanced one by one. fairseq's dummy batches, by which ranks without a batch take
part at the end of an epoch, are counted too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import MoEConfig
from ..distributed import process_world, sum_tensor_over_ranks_
from .metrics import MoEAux, balanced_pairs


def balance_over_ranks(reports: Sequence[MoEAux], config: MoEConfig) -> list[MoEAux]:
    """Add the balance loss to reports of layers that left it to be computed over all ranks.

    One all-reduce of integers for all layers of a forward pass. Collective over all ranks if there
    is anything to add, which is so in training with ``balance_scope="global"``.

    Args:
        reports: of layers with as many experts each, in the same order on all ranks.
        config: of the layers.
    """
    waiting = [aux for aux in reports if aux.prob_sum_E is not None]
    if not waiting:
        return list(reports)
    share_LE = _shares(waiting, config.balance_choices_counted)
    finished = []
    for aux in reports:
        if aux.prob_sum_E is not None:
            prob_E = aux.prob_sum_E / max(aux.num_tokens, 1)
            loss = aux.loss + len(prob_E) * torch.dot(prob_E, share_LE[0].to(prob_E.dtype))
            aux, share_LE = aux._replace(loss=loss, prob_sum_E=None), share_LE[1:]
        finished.append(aux)
    return finished


@torch.no_grad()
def _shares(reports: Sequence[MoEAux], choices: int) -> torch.Tensor:
    """fp64 [L, E], share of the tokens of all ranks that go to each expert, per choice."""
    counts_LE = [
        balanced_pairs(aux.num_routed_KE, aux.num_chosen_KE, aux.num_null_KN)[:choices].sum(
            0, dtype=torch.int64
        )
        for aux in reports
    ]
    tokens_L = [
        counts.new_full((1,), aux.num_tokens)
        for counts, aux in zip(counts_LE, reports, strict=True)
    ]
    counts = torch.cat([torch.stack(counts_LE), torch.stack(tokens_L)], dim=1)
    if process_world()[1] > 1:
        sum_tensor_over_ranks_(counts)
    return counts[:, :-1].double() / (choices * counts[:, -1:]).clamp(min=1)
