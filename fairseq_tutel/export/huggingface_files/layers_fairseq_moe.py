"""Layers of fairseq's GPT-style decoder with mixture-of-experts, in operators of torch alone.

A config names the sizes and options: see ``configuration_fairseq_moe.py``.
"""

import math

import torch
from torch import nn
from torch.nn import functional

# fairseq counts positions from the number after the padding's
FIRST_POSITION = 2
ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "linear": lambda x: x,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "tanh": torch.tanh,
}
GATES = {"swiglu": functional.silu, "geglu": functional.gelu}


class FairseqMoEPositions(nn.Module):
    """Sinusoidal positions of any length: int64 [..., L] -> fp32 [..., L, M], sines first."""

    def __init__(self, config):
        super().__init__()
        self.dim = config.hidden_size

    def forward(self, position_ids):
        half = self.dim // 2
        step = -math.log(10000) / (half - 1)
        rate = torch.exp(torch.arange(half, dtype=torch.float, device=position_ids.device) * step)
        angle = (position_ids + FIRST_POSITION)[..., None].float() * rate
        waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
        return functional.pad(waves, (0, self.dim % 2))


class FairseqMoELearnedPositions(nn.Embedding):
    """Learned positions: int64 [..., L] -> [..., L, M]."""

    def __init__(self, config):
        super().__init__(config.max_position_embeddings + FIRST_POSITION, config.hidden_size)

    def forward(self, position_ids):
        return super().forward(position_ids + FIRST_POSITION)


def make_positions(config):
    """Return the module of ``config.position_embedding``, or None for "none"."""
    kinds = {"sinusoidal": FairseqMoEPositions, "learned": FairseqMoELearnedPositions}
    kind = kinds.get(config.position_embedding)
    return None if kind is None else kind(config)


class FairseqMoERouter(nn.Module):
    """Router: tokens [T, M] -> experts int64 [T, K] and their weights fp32 [T, K]."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts) if config.router_load_bias else None
        self.register_buffer("load_bias", bias)

    def forward(self, hidden_states):
        config = self.config
        if config.router_fp32:
            logits = functional.linear(hidden_states.float(), self.weight.float())
        else:
            logits = functional.linear(hidden_states, self.weight).float()
        sigmoid = config.score_function == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        key = scores if sigmoid else logits
        if self.load_bias is not None:
            key = key + self.load_bias.float()
        if config.num_expert_groups > 1:
            key = self.limit_to_groups(key)
        index = key.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, index)
        if config.norm_topk_prob:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.clamp(min=torch.finfo(total.dtype).eps)
        return index, weights * config.routed_scale

    def limit_to_groups(self, key):
        """Return the keys [T, E] with -inf outside the best groups of each token."""
        groups, largest = self.config.num_expert_groups, {"top2": 2, "max": 1}
        values = key if self.config.score_function == "sigmoid" else key.softmax(-1)
        grouped = values.unflatten(-1, (groups, -1))
        scores = grouped.topk(largest[self.config.group_score], dim=-1).values.sum(-1)
        best = scores.topk(self.config.top_groups, dim=-1).indices
        outside = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best, False)
        outside = outside.repeat_interleave(grouped.shape[-1], dim=-1)
        return key.masked_fill(outside, -torch.inf)


class FairseqMoEExpertWeights(nn.Module):
    """Weights of all experts of a layer, and the network of one expert.

    The network is down(act(up(x))), or down(act(gate(x)) * up(x)) with both in ``gate_up_proj``,
    or that with both clamped, and other constants. A subclass computes tokens [T, M], experts
    [T, K] and weights [T, K] -> [T, M].
    """

    def __init__(self, config):
        super().__init__()
        count, dim, hidden = config.num_experts, config.hidden_size, config.moe_ffn_dim
        self.num_experts = count
        self.gated = config.expert_network != "ffn"
        self.up_name, rows = ("gate_up_proj", 2 * hidden) if self.gated else ("up_proj", hidden)
        shapes = {self.up_name: (count, rows, dim), "down_proj": (count, dim, hidden)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            if config.expert_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(shape[:2])))
        function = GATES.get(config.expert_network)
        self.act_fn = function or ACTIVATIONS[config.activation_function]
        self.clamped = None
        if config.expert_network == "clamped_swiglu":
            self.clamped = config.gate_limit, config.gate_alpha, config.gate_shift

    def activate(self, hidden):
        """Return the input of the second projection: [R, F] or [R, 2F] -> [R, F]."""
        if not self.gated:
            return self.act_fn(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        if self.clamped is None:
            return self.act_fn(gate) * up
        limit, alpha, shift = self.clamped
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + shift)

    def _apply_gate(self, hidden):
        """Compute what transformers' implementations of experts put between the projections."""
        return self.activate(hidden)

    def compute(self, rows, expert):
        """Return the outputs of one expert: [R, M] -> [R, M]."""
        hidden = functional.linear(rows, *self.projection(self.up_name, expert))
        return functional.linear(self.activate(hidden), *self.projection("down_proj", expert))

    def projection(self, name, expert):
        """Return the weight and the bias (or None) of an expert, or of each in an index tensor."""
        bias = getattr(self, f"{name}_bias", None)
        return getattr(self, name)[expert], None if bias is None else bias[expert]


class FairseqMoEFeedForward(nn.Module):
    """Feed-forward network: fc2(act(fc1(x)))."""

    def __init__(self, config, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, config.hidden_size)
        self.act_fn = ACTIVATIONS[config.activation_function]

    def forward(self, hidden_states):
        return self.fc2(self.act_fn(self.fc1(hidden_states)))


class FairseqMoEBlock(nn.Module):
    """Router, experts, and the shared expert if there is one: [..., M] -> [..., M]."""

    def __init__(self, config, experts):
        super().__init__()
        self.output_scale = config.moe_output_scale
        self.router = FairseqMoERouter(config)
        # not `experts`: vLLM replaces a child of that name
        self.ffn_experts = experts
        self.shared_expert = None
        if config.shared_expert_dim:
            self.shared_expert = FairseqMoEFeedForward(config, config.shared_expert_dim)
        self.shared_expert_gate = None
        if config.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights = self.router(tokens)
        out = self.ffn_experts(tokens, index, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if self.shared_expert_gate is not None:
                shared = torch.sigmoid(self.shared_expert_gate(tokens)) * shared
            out = out + shared
        return (out * self.output_scale).view(hidden_states.shape)


class FairseqMoEDecoderLayer(nn.Module):
    """Decoder layer: attention, then a feed-forward network or experts, each after a norm."""

    def __init__(self, config, layer_idx, attention, make_experts):
        super().__init__()
        self.self_attn = attention
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        self.moe = self.ffn = None
        if layer_idx in config.moe_layers:
            self.moe = FairseqMoEBlock(config, make_experts(config))
        else:
            self.ffn = FairseqMoEFeedForward(config, config.ffn_dim)

    def forward(self, hidden_states, **kwargs):
        out, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + out
        compute = self.ffn if self.moe is None else self.moe
        return hidden_states + compute(self.final_layer_norm(hidden_states))
