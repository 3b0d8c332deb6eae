"""Router by a linear map of the tokens, as in fairseq's ``moe`` branch.

Products of half tokens are fp32 and are not rounded to half, forward and backward.
"""

import torch
from torch import nn

from ... import ops
from ...config import ROUTERS, MoEConfig
from ..torch_modes import call_in, is_observed, is_plain_linear
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
        wide = torch.promote_types(x_TM.dtype, torch.float32)
        if x_TM.dtype != wide and not self.config.gating_fp32:
            return call_in(self.wg, x_TM, x_TM.dtype).to(wide)
        if not self._is_plain:
            return call_in(self.wg, x_TM, wide)
        return ops.gate_logits(x_TM, self.wg.weight)

    @property
    def _is_plain(self) -> bool:
        """Whether nothing hooks or replaces the linear layer, as peft and quantize_dynamic do."""
        return is_plain_linear(self.wg) and self.wg.bias is None

    def logits_and_tokens(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        # neither a subclass nor an attribute of this router replaces the product
        own = getattr(self.logits, "__func__", None) is LinearRouter.logits
        usual = own and self._is_plain
        # a hook could keep the gradient that the gate's product adds to
        if not usual or not self.config.gating_fp32 or is_observed(self):
            return self.logits(x_TM), None
        return ops.gate_logits_and_tokens(x_TM, self.wg.weight)
