"""Conditional MoE routing (CMR): a gate mixes the outputs of a dense FFN and of the experts.

y = (1 - g) FFN(x) + g MoE(x) with g = dropout(sigmoid(w x + b)), a number per token, as in NLLB
(arXiv 2207.04672, section 6.2.2; arXiv 2212.07571) and fairseq's branch ``nllb``. All tokens are
routed and take capacity, so it saves no computation.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn

from ....config.options import Range, option


@dataclass
class ConditionalRoutingOptions:
    """Base of a model's dataclass."""

    moe_cmr: bool = option(
        False,
        "conditional MoE routing (arXiv 2212.07571): a gate mixes the experts with a dense FFN",
        group="routing",
    )
    cmr_gate_drop: float = option(
        0.0,
        "dropout of that gate; dropped tokens use the dense FFN alone",
        Range(0, 1, high_open=True),
        group="routing",
        needs=["moe_cmr"],
    )


class ConditionalRouting(nn.Module):
    """Gate and mixture. Parameters: ``gate.wg.weight`` [1, M] and ``gate.wg.bias`` [1]."""

    def __init__(self, dim: int, drop: float):
        super().__init__()
        self.gate = nn.ModuleDict({"wg": nn.Linear(dim, 1)})
        self.drop = drop

    def forward(
        self,
        x: torch.Tensor,
        dense: torch.Tensor,
        sparse: torch.Tensor,
        pad_mask: Optional[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix two outputs for x, [batch, seq, M] each; return y and ``MoEAux.share_of_layer``.

        Padding (``pad_mask`` bool [batch, seq] is True) gets the dense output and is not counted.
        """
        share = nn.functional.dropout(self.gate["wg"](x).sigmoid(), self.drop, self.training)
        tokens = share.new_full((), share.numel(), dtype=torch.float32)
        if pad_mask is not None:
            padded = pad_mask[..., None]
            share = share.masked_fill(padded, 0)
            tokens = tokens - padded.sum()
        y = (1 - share) * dense + share * sparse
        return y, torch.stack([share.float().sum(), tokens])
