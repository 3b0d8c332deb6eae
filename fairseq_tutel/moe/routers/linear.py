"""Router by a linear map of the tokens, as in fairseq's ``moe`` branch.

Products of half tokens are fp32 and are not rounded to half, forward and backward.
"""

from __future__ import annotations

import torch
from torch import nn

from ... import ops
from ...config import ROUTERS, MoEConfig
from .base import TopKRouter


@ROUTERS.register("linear")
class LinearRouter(TopKRouter):
    """a linear map without bias (Switch Transformer, GShard).

    Its weight has the same name as in fairseq's checkpoints. Without ``config.gating_fp32`` the
    logits of half tokens are rounded to the tokens' dtype first.
    """

    def __init__(self, model_dim: int, config: MoEConfig):
        super().__init__(model_dim, config)
        self.wg = nn.Linear(model_dim, config.num_outputs, bias=False)

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.wg, nn.Linear):  # a tool replaced it, as quantize_dynamic does
            return self.wg(x_TM).float()
        if x_TM.dtype in (torch.float16, torch.bfloat16) and not self.config.gating_fp32:
            return nn.functional.linear(x_TM, self.wg.weight.to(x_TM.dtype)).float()
        return ops.gate_logits(x_TM, self.wg.weight)
