"""Logits as a linear map of the tokens, the router of fairseq's ``moe`` branch.

The product of half tokens leaves in fp32, never rounded to half in between, forward and backward.
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

    Its weight has the name that fairseq's checkpoints use. Without ``config.gating_fp32`` the
    logits of half tokens are rounded to the tokens' dtype first.
    """

    def __init__(self, model_dim: int, config: MoEConfig):
        super().__init__(model_dim, config)
        self.wg = nn.Linear(model_dim, config.num_outputs, bias=False)

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        if x_TM.dtype in (torch.float16, torch.bfloat16) and not self.config.gating_fp32:
            return nn.functional.linear(x_TM, self.wg.weight.to(x_TM.dtype)).float()
        return ops.gate_logits(x_TM, self.wg.weight)
