"""Budget of conditional routing: a loss that pulls the experts' mean share towards p.

C = | sum of the gates / number of tokens - p | over all layers of a forward pass, as in fairseq's
branch ``nllb``. With ``--moe-cmr-xgpu`` C counts the tokens of all ranks, and the gradient is that
of a single process with all tokens (in the branch it is W times less on W ranks).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional

import torch

from ....config.options import FRACTION, at_least, check_ranges, option
from ....distributed import process_world, sum_tensor_over_ranks_
from ....moe import MoEAux


@dataclass
class BudgetOptions:
    """Base of a criterion's dataclass, with the branch's names."""

    cmr_gate_loss_wt: float = option(
        0.0,
        "weight of the distance between --cmr-gate-loss-p and the experts' mean share",
        at_least(0),
        group="balance",
        needs=["moe_cmr"],
    )
    cmr_gate_loss_p: float = option(
        1.0,
        "target share of the experts in conditional routing, 0..1",
        FRACTION,
        group="balance",
        needs=["cmr_gate_loss_wt"],
    )
    moe_cmr_xgpu: bool = option(
        False,
        "take the mean of that share over all ranks",
        group="balance",
        needs=["cmr_gate_loss_wt"],
    )


class Budget:
    """Budget term of a criterion's loss; ValueError for options out of range."""

    def __init__(self, weight: float = 0.0, share: float = 1.0, over_ranks: bool = False):
        given = SimpleNamespace(cmr_gate_loss_wt=weight, cmr_gate_loss_p=share)
        check_ranges(given, BudgetOptions)
        self.weight, self.share, self.over_ranks = weight, share, over_ranks

    def __call__(self, reports: Sequence[MoEAux], sample_size: float) -> Optional[torch.Tensor]:
        """Return n C for a sample size n, an fp32 scalar; None without weight or shares."""
        shares = [aux.share_of_layer for aux in reports if aux.share_of_layer is not None]
        if not shares or not self.weight:
            return None
        used, tokens = torch.stack(shares).sum(0)
        if not self.over_ranks or process_world()[1] == 1:
            return sample_size * (used / tokens.clamp(min=1e-5) - self.share).abs()
        total = torch.stack([used.detach(), tokens, tokens.new_tensor(float(sample_size))])
        sum_tensor_over_ranks_(total)
        all_used, all_tokens, all_samples = total
        all_tokens = all_tokens.clamp(min=1e-5)
        # the value counts this rank's samples; the gradient counts those of all ranks
        distance = all_used / all_tokens - self.share
        own = all_samples * distance.sign() * used / all_tokens
        return sample_size * distance.abs() + own - own.detach()
