"""Router by cosines in a projected space over a learned temperature.

X-MoE, arXiv 2204.09179, section 3.1, with Tutel's defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ...config import ROUTERS, MoEConfig, Options, at_least, option
from ..torch_modes import call_in
from .base import TopKRouter

_MIN_TEMPERATURE = 0.01


@ROUTERS.register("cosine")
class CosineRouter(TopKRouter):
    """cosines to learned directions over a learned temperature (X-MoE)."""

    @dataclass(frozen=True)
    class Options(Options):
        proj_dim: int = option(
            256, "dimensions of the space of the cosines, at most those of the model", at_least(1)
        )
        init_temperature: float = option(
            0.5, "temperature at the start of training", at_least(_MIN_TEMPERATURE)
        )
        bias: bool = option(False, "give the projection into that space a bias, as Tutel does")

    def __init__(self, model_dim: int, config: MoEConfig):
        super().__init__(model_dim, config)
        proj_dim = min(self.options.proj_dim, model_dim)
        self.proj = nn.Linear(model_dim, proj_dim, bias=self.options.bias)
        self.expert_dirs = nn.Parameter(torch.empty(config.num_outputs, self.proj.out_features))
        nn.init.normal_(self.expert_dirs, std=0.01)
        self.log_scale = nn.Parameter(torch.tensor([math.log(1.0 / self.options.init_temperature)]))
        self.max_log_scale = math.log(1.0 / _MIN_TEMPERATURE)

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x_TM.dtype, torch.float32)
        point_TA = nn.functional.normalize(call_in(self.proj, x_TM, dtype), dim=1)
        dirs_EA = nn.functional.normalize(self.expert_dirs.to(dtype), dim=1)
        scale = self.log_scale.to(dtype).clamp(max=self.max_log_scale).exp()
        return (point_TA @ dirs_EA.t()) * scale
