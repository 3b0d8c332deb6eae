"""A user dir of somebody else, written by the pages of e821d35. It stays as it is.

It has a router, two networks of experts and an exchange, each by the documented recipe:
``moe/routers/base.py``, ``moe/experts/base.py`` and ``tests/distributed/test_toy_exchange.py``.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import fairseq_tutel
from fairseq_tutel.config import at_least, option
from fairseq_tutel.distributed import Direction, ExchangeAlgorithm, register_exchange
from fairseq_tutel.moe import Router, RouterAux, build_routing, register_router
from fairseq_tutel.moe.experts import Options, Stacked, StackedExperts, register_experts
from fairseq_tutel.moe.routers import TopKRouter, above


@register_router("users")
class UsersRouter(TopKRouter):
    """the logits of a linear map, multiplied by a number"""

    @dataclass(frozen=True)
    class Options(Options):
        scale: float = option(1.0, "what the logits are multiplied by", above(0))

    def __init__(self, model_dim, config):
        super().__init__(model_dim, config)
        self.wg = nn.Linear(model_dim, config.num_outputs, bias=False)

    def logits(self, x_TM):
        logits_TE = functional.linear(x_TM.float(), self.wg.weight.float())
        return self.options.scale * logits_TE


@register_router("users-whole")
class WholeRouter(Router):
    """sigmoid scores of the K best experts, without a balance loss"""

    def __init__(self, model_dim, config):
        super().__init__(model_dim, config)
        self.wg = nn.Linear(model_dim, config.num_experts, bias=False)

    def forward(self, x_TM, pad_mask_T, call):
        score_TE = self.wg(x_TM).float().sigmoid()
        weight_TK, expert_TK = score_TE.topk(call.config.top_k)
        routing = build_routing(expert_TK.to(torch.int32), weight_TK, call)
        zero = score_TE.new_zeros(())
        return routing, RouterAux(zero, zero.detach(), routing.num_routed_KE)


@register_experts("users")
class UsersExperts(StackedExperts):
    """down(leaky_relu(up(x)))"""

    @dataclass(frozen=True)
    class Options(Options):
        slope: float = option(0.1, "of the activation left of 0", at_least(0))

    layout = {
        "up_weight": Stacked("FM", "up.weight"),
        "down_weight": Stacked("MF", "down.weight"),
    }

    def compute(self, prepared, rows, offsets):
        up, down = prepared.params
        hidden = self.product(rows, up, offsets)
        return self.product(functional.leaky_relu(hidden, self.options.slope), down, offsets)


@register_experts("users-bias")
class BiasedExperts(StackedExperts):
    """down(tanh(up(x))) and a bias, which reads where the rows of each expert end"""

    layout = {
        "up_weight": Stacked("FM", "up.weight"),
        "down_weight": Stacked("MF", "down.weight"),
        "down_bias": Stacked("M", "down.bias"),
    }

    def compute(self, prepared, rows, offsets):
        up, down, bias = prepared.params
        out = self.product(self.product(rows, up, offsets).tanh(), down, offsets)
        if offsets is None:  # [e, N, M]
            return out + bias[:, None]
        expert = torch.searchsorted(offsets.long(), torch.arange(len(rows)), right=True)
        return out + bias[expert.clamp(max=len(bias) - 1)]


@register_exchange("users")
class UsersExchange(ExchangeAlgorithm):
    """A broadcast per rank; each takes what is meant for it."""

    @classmethod
    def partitions(cls, num_ranks, ranks_per_node):
        return {"own": [list(range(num_ranks))]}

    @classmethod
    def predict(cls, num_bytes, num_ranks, network):
        return num_ranks * num_bytes / network.node_bandwidth

    def move(self, rows, received, direction: Direction, splits):
        ranks, me = self.groups.ep_size, self.groups.ep_rank
        equal = [rows.shape[0] // ranks] * ranks
        to = equal if splits is None else splits.sizes(direction.outward)[0]
        table = [torch.empty(ranks, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(table, torch.tensor(to), group=self.subgroups["own"])
        arrived = []
        for source, sizes in enumerate(row.tolist() for row in table):
            data = rows if source == me else rows.new_empty(sum(sizes), *rows.shape[1:])
            dist.broadcast(data, group=self.subgroups["own"], group_src=source)
            arrived.append(data.split(sizes)[me])
        torch.cat(arrived, out=received)


fairseq_tutel.register()
