"""A router of a user's own, as a fairseq user dir: all that adding one takes is this file."""

from dataclasses import dataclass

import torch
from torch import nn

from fairseq_tutel.config.options import FRACTION
from fairseq_tutel.moe import Router, RouterAux, build_routing, register_router
from fairseq_tutel.moe.losses import balance_loss
from fairseq_tutel.moe.routers import Options, option


@register_router("toy")
class ToyRouter(Router):
    """sigmoid scores, chosen with a bias against the load (the idea of arXiv 2408.15664)."""

    @dataclass(frozen=True)
    class Options(Options):
        """Options of the toy router."""

        rate: float = option(0.125, "how far the bias moves in one call", FRACTION)
        score: str = option("sigmoid", "of an expert", choices=("sigmoid", "tanh"))

    def __init__(self, model_dim, config):
        super().__init__(model_dim, config)
        self.wg = nn.Linear(model_dim, config.num_experts, bias=False)
        self.register_buffer("load_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x_TM, pad_mask_T, call):
        """Sigmoid or tanh, the K best with the bias, a balance loss."""
        score_TE = getattr(self.wg(x_TM).float(), self.options.score)()
        expert_TK = (score_TE + self.load_bias).topk(call.config.top_k).indices
        routing = build_routing(expert_TK.to(torch.int32), score_TE.gather(1, expert_TK), call)
        load_E = routing.num_routed_KE.sum(0).float()
        if call.training:
            self.load_bias += self.options.rate * (load_E.mean() - load_E).sign()
        loss = balance_loss(score_TE.sum(0), routing.num_routed_KE[0], len(x_TM))
        return routing, RouterAux(loss, torch.zeros_like(loss).detach(), routing.num_routed_KE)
