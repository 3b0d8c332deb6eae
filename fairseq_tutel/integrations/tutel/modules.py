"""Gates and experts by Tutel's names, with its parameters and initial draws.

Gates map tokens [T, M] to logits [T, E], experts [e, N, M] to as many rows of this rank's experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...moe.routers import call_in
from . import net


class LinearTopKGate(nn.Module):
    """The gate ``top``: a linear map without bias."""

    def __init__(
        self, model_dim, num_global_experts, k=1, fp32_gate=False, *, capacity_factor=1.0,
        gate_noise=0.0, **sizes,
    ):  # fmt: skip
        super().__init__()
        self.top_k, self.fp32_gate = min(num_global_experts, int(k)), fp32_gate
        self.capacity_factor, self.gate_noise = capacity_factor, gate_noise
        self._make(model_dim, num_global_experts, **sizes)

    def _make(self, model_dim, num_global_experts):
        dtype = torch.float32 if self.fp32_gate else None
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return call_in(self.wg, x, torch.float32 if self.fp32_gate else self.wg.weight.dtype)


class CosineTopKGate(LinearTopKGate):
    """The gate ``cosine_top``: similarity to a direction per expert, with a learned temperature."""

    def _make(self, model_dim, num_global_experts, proj_dim=256, init_t=0.5):
        self.temperature = nn.Parameter(torch.full([1], 1.0 / init_t).log())
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts))
        nn.init.normal_(self.sim_matrix, 0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self.fp32_gate else self.sim_matrix.dtype
        point_TA = functional.normalize(call_in(self.cosine_projector, x, dtype), dim=1)
        direction_AE = functional.normalize(self.sim_matrix.to(dtype), dim=0)
        return point_TA @ direction_AE * self.temperature.exp().clamp(max=100)


class FusedExpertsNetwork(nn.Module):
    """The experts ``ffn``: ``fc2(activation_fn(fc1(x)))``, all experts of a rank at once.

    Of an expert on S ranks (``sharded_count``), each has a slice of every parameter.
    """

    def __init__(
        self, model_dim, hidden_size_per_expert, num_experts_per_device, sharded_count,
        activation_fn=None, activation_fn_with_self=None, output_dim=None, has_fc1_bias=True,
        has_fc2_bias=True,
    ):  # fmt: skip
        super().__init__()
        units, rest = divmod(hidden_size_per_expert, sharded_count)
        if rest:
            raise ValueError(
                f"hidden_size_per_expert={hidden_size_per_expert} must be a multiple of the "
                f"{sharded_count} ranks that share an expert"
            )
        if None not in (activation_fn, activation_fn_with_self):
            raise ValueError("activation_fn contradicts activation_fn_with_self: give one")
        if activation_fn_with_self is not None:
            activation_fn = lambda hidden: activation_fn_with_self(hidden, self)  # noqa: E731
        self.activation_fn = activation_fn or functional.relu
        self.output_dim = output_dim or model_dim
        drawn, width = [], -(-self.output_dim // sharded_count)
        for _ in range(num_experts_per_device):  # each draws fc1, then fc2
            fc1 = nn.Linear(model_dim, units, bias=has_fc1_bias)
            fc2 = nn.Linear(units, self.output_dim, bias=has_fc2_bias)
            bias = fc2.bias[:width] if has_fc2_bias else None
            drawn.append((fc1.weight, fc2.weight.t(), fc1.bias, bias))
        names = ("fc1_w", "fc2_w", "fc1_bias", "fc2_bias")
        for name, parts in zip(names, zip(*drawn, strict=True), strict=True):
            param = None if parts[0] is None else nn.Parameter(torch.stack(parts).detach())
            self.register_parameter(f"batched_{name}", param)

    def forward(self, x: Tensor, ctx) -> Tensor:
        w1, b1, w2, b2 = self._parameters_for(ctx)
        hidden = torch.matmul(x, w1.transpose(1, 2))
        hidden = self.activation_fn(hidden if b1 is None else hidden + b1[:, None])
        out = torch.matmul(hidden, w2)
        return out if b2 is None else out + b2[:, None]

    def _parameters_for(self, ctx) -> tuple[Any, ...]:
        """Return what this rank computes with: all experts (r = 0), or S / r slices of each."""
        sharded, r = ctx.sharded_count, ctx.adaptive_degree
        experts = ctx.num_local_experts if r else ctx.num_global_experts

        def whole(name, ranks):
            param = getattr(self, f"batched_{name}")
            if param is None or ranks == 1:
                return param
            group = net.neighbours(ranks) if r else ctx.group
            return net.zero_gather(param, group=group).view(experts, -1, *param.shape[2:])

        ranks = sharded // r if r else ctx.world_size
        bias = whole("fc2_bias", sharded if r else ranks)
        if bias is not None:  # r ranks compute parts of an output, each with its part of the bias
            bias = bias[:, : self.output_dim] / max(r, 1)
        return whole("fc1_w", ranks), whole("fc1_bias", ranks), whole("fc2_w", ranks), bias

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={list(p.shape)}" for name, p in self.named_parameters())
        return f"output_dim={self.output_dim}, {shapes}"


GATES = {"top": LinearTopKGate, "cosine_top": CosineTopKGate}
EXPERTS = {"ffn": FusedExpertsNetwork}
