"""Router by a linear map of the tokens, as in fairseq's ``moe`` branch.

Products of half tokens are fp32 and are not rounded to half, forward and backward.
"""

import torch
from torch import nn

from ... import ops
from ...config import ROUTERS, MoEConfig
from ..torch_modes import is_observed
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

    def logits_and_tokens(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        # neither a subclass nor an attribute of this router replaces the product
        own = getattr(self.logits, "__func__", None) is LinearRouter.logits
        usual = own and isinstance(self.wg, nn.Linear)
        # a hook could keep the gradient that the gate's product adds to
        if not usual or not self.config.gating_fp32 or is_observed(self):
            return self.logits(x_TM), None
        return ops.gate_logits_and_tokens(x_TM, self.wg.weight)
