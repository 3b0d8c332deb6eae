"""The model in evaluation, in core operators of torch alone, so that it can be compiled ahead.

A layer's ``forward`` in this package uses operators of its own (``torch.ops.fairseq_tutel``), which
run in a process with Python only. These modules compute the same numbers without them. Their
tensors have the names of :mod:`.description`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .description import ModelDescription, MoEDescription

_PAD = 1  # in every dictionary of fairseq
_ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "linear": lambda x: x,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "tanh": torch.tanh,
}
_GATES = {"swiglu": functional.silu, "geglu": functional.gelu}


class InferenceRouter(nn.Module):
    """Tokens [T, M] -> their experts' indices [T, K], and fp32 weights [T, K]."""

    def __init__(self, moe: MoEDescription):
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, moe.model_dim))
        self.register_buffer("load_bias", torch.empty(moe.num_experts) if moe.load_bias else None)

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.moe
        if moe.gating_fp32:
            logits_TE = functional.linear(x_TM.float(), self.weight.float())
        else:
            logits_TE = functional.linear(x_TM, self.weight).float()
        sigmoid = moe.score_function == "sigmoid"
        score_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(1)
        key_TE = score_TE
        if self.load_bias is not None:
            key_TE = (score_TE if sigmoid else logits_TE) + self.load_bias.float()
        expert_TK = key_TE.topk(moe.top_k, dim=1).indices
        weight_TK = score_TE.gather(1, expert_TK)
        if moe.normalized:
            total_T1 = weight_TK.sum(1, keepdim=True)
            weight_TK = weight_TK / total_T1.clamp(min=torch.finfo(total_T1.dtype).eps)
        return expert_TK, weight_TK * moe.routed_scale


class InferenceExperts(nn.Module):
    """All experts: tokens [T, M], their experts and weights [T, K] -> [T, M]."""

    def __init__(self, moe: MoEDescription):
        super().__init__()
        self.moe = moe
        for name, shape in moe.shapes().items():
            room, _, leaf = name.partition(".")
            if room == "ffn_experts":
                self.register_parameter(leaf, nn.Parameter(torch.empty(shape)))
        self.up = "up_proj" if moe.network == "ffn" else "gate_up_proj"

    def forward(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        # torch's grouped products are compiled for this dtype only
        bf16 = x_TM.dtype == torch.bfloat16
        pairs, rows = (self._grouped if bf16 else self._one_by_one)(x_TM, expert_TK)
        num_tokens, top_k = expert_TK.shape
        rows_TKM = x_TM.new_zeros(num_tokens * top_k, x_TM.shape[1]).index_put((pairs,), rows)
        rows_TKM = rows_TKM.view(num_tokens, top_k, -1)
        return (rows_TKM * weight_TK[:, :, None]).sum(1).to(x_TM.dtype)

    def _one_by_one(self, x_TM, expert_TK):
        """Pairs t*K+k in the order of the experts, and their rows: a product per expert."""
        top_k = expert_TK.shape[1]
        pairs, rows = [], []
        for expert in range(self.moe.num_experts):
            mine = (expert_TK.flatten() == expert).nonzero()[:, 0]
            up, down = getattr(self, self.up)[expert], self.down_proj[expert]
            hidden = functional.linear(x_TM[mine // top_k], up, self._bias(self.up, expert))
            hidden = self._activate(hidden)
            pairs.append(mine)
            rows.append(functional.linear(hidden, down, self._bias("down_proj", expert)))
        return torch.cat(pairs), torch.cat(rows)

    def _grouped(self, x_TM, expert_TK):
        """The same by one grouped product per projection."""
        sorted_P, pairs = expert_TK.flatten().sort(stable=True)
        experts = torch.arange(self.moe.num_experts, device=x_TM.device)
        ends = (sorted_P[None] <= experts[:, None]).sum(1, dtype=torch.int32)

        def product(rows, name):
            out = functional.grouped_mm(rows, getattr(self, name).transpose(1, 2), offs=ends)
            return out + self._bias(name, sorted_P) if self.moe.bias else out

        hidden = product(x_TM[pairs // expert_TK.shape[1]], self.up)
        return pairs, product(self._activate(hidden), "down_proj")

    def _bias(self, name, expert):
        return getattr(self, f"{name}_bias")[expert] if self.moe.bias else None

    def _activate(self, hidden):
        if self.moe.network == "ffn":
            return _ACTIVATIONS[self.moe.activation](hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return _GATES[self.moe.network](gate) * up


class InferenceFeedForward(nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(self, dim: int, hidden: int, activation: str):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class InferenceMoE(nn.Module):
    """A layer with experts: [..., M] -> [..., M]; nothing is dropped."""

    def __init__(self, moe: MoEDescription):
        super().__init__()
        self.router, self.ffn_experts = InferenceRouter(moe), InferenceExperts(moe)
        self.shared_expert = None
        if moe.shared_dim:
            self.shared_expert = InferenceFeedForward(moe.model_dim, moe.shared_dim, moe.activation)
        self.output_scale = moe.output_scale

    def forward(self, x: Tensor) -> Tensor:
        x_TM = x.flatten(0, -2)
        y_TM = self.ffn_experts(x_TM, *self.router(x_TM))
        if self.shared_expert is not None:
            y_TM = y_TM + self.shared_expert(x_TM)
        if self.output_scale != 1:
            y_TM = y_TM * self.output_scale
        return y_TM.view(x.shape)


class InferenceAttention(nn.Module):
    """[B, L, M] and what may be seen, bool [B, 1, L, L] -> [B, L, M]."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(dim, dim))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class InferenceLayer(nn.Module):
    """A layer of the decoder: norm, attention; norm, feed-forward network or experts."""

    def __init__(self, model: ModelDescription, number: int):
        super().__init__()
        dim = model.model_dim
        self.self_attn = InferenceAttention(dim, model.num_heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        if number in model.moe_layers:
            self.moe = InferenceMoE(model.moe)
        else:
            self.ffn = InferenceFeedForward(dim, model.ffn_dim, model.activation)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), visible)
        compute = self.moe if hasattr(self, "moe") else self.ffn
        return x + compute(self.final_layer_norm(x))


class InferenceDecoder(nn.Module):
    """Tokens int64 [B, L] -> features [B, L, M]."""

    def __init__(self, model: ModelDescription):
        super().__init__()
        dim = model.model_dim
        self.positions = model.positions
        self.scale = math.sqrt(dim) if model.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(model.vocab_size, dim)
        if model.positions == "learned":
            self.embed_positions = nn.Embedding(model.max_positions + _PAD + 1, dim)
        layers = [InferenceLayer(model, number) for number in range(model.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(dim) if model.final_norm else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = tokens != _PAD
        order = torch.arange(tokens.shape[1], device=tokens.device)
        seen = is_token[:, None, :] & (order[:, None] >= order)
        # padding sees itself, or it would be a mean of nothing
        visible = (seen | (order[:, None] == order))[:, None]
        x = self.embed_tokens(tokens) * self.scale
        if self.positions != "none":
            position = is_token.cumsum(1) * is_token + _PAD
            learned = self.positions == "learned"
            x = x + (self.embed_positions(position) if learned else _sinusoids(position, x))
        for layer in self.layers:
            x = layer(x, visible)
        return self.layer_norm(x)


class InferenceModel(nn.Module):
    """A language model: tokens int64 [B, L] -> logits [B, L, V]; number 1 is padding."""

    def __init__(self, model: ModelDescription):
        super().__init__()
        self.model = InferenceDecoder(model)
        self.tied = model.tied
        if not model.tied:
            self.lm_head = nn.Linear(model.model_dim, model.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model(tokens)
        weight = self.model.embed_tokens.weight if self.tied else self.lm_head.weight
        return functional.linear(x, weight)


def _sinusoids(position: Tensor, x: Tensor) -> Tensor:
    """Sines and cosines of positions [B, L], like x [B, L, M] (Vaswani et al., 2017)."""
    half = x.shape[-1] // 2
    step = -math.log(10000) / (half - 1)
    rate = torch.exp(torch.arange(half, dtype=torch.float, device=x.device) * step)
    angle = position[..., None].float() * rate
    waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
    return functional.pad(waves, (0, x.shape[-1] % 2)).to(x.dtype)
