"""The exported model in evaluation, in core operators of torch, to be compiled ahead of time.

``MoELayer`` uses operators of its own (``torch.ops.fairseq_tutel``), which need Python. These
modules compute the same numbers without them. Their layers are those of ``huggingface_files``.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .description import LayerConfig, ModelConfig
from .huggingface_files.layers_fairseq_moe import (
    FairseqMoEBlock,
    FairseqMoEDecoderLayer,
    FairseqMoEExpertWeights,
    make_positions,
)

_PAD = 1  # in every dictionary of fairseq


class InferenceExperts(FairseqMoEExpertWeights):
    """Experts without a loop over data: tokens [T, M], experts and weights [T, K] -> [T, M]."""

    def forward(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        # torch compiles grouped products in this dtype only
        bf16 = x_TM.dtype == torch.bfloat16
        pairs, rows = (self._grouped if bf16 else self._one_by_one)(x_TM, expert_TK)
        (num_tokens, top_k), dim = expert_TK.shape, x_TM.shape[1]
        rows_PM = x_TM.new_zeros(num_tokens * top_k, dim).index_put((pairs,), rows)
        rows_TKM = rows_PM.view(num_tokens, top_k, dim)
        return (rows_TKM * weight_TK[:, :, None]).sum(1).to(x_TM.dtype)

    def _one_by_one(self, x_TM, expert_TK):
        """Return pairs t*K+k in the order of the experts, and their rows, one product each."""
        top_k = expert_TK.shape[1]
        pairs, rows = [], []
        for expert in range(self.num_experts):
            mine = (expert_TK.flatten() == expert).nonzero()[:, 0]
            pairs.append(mine)
            rows.append(self.compute(x_TM[mine // top_k], expert))
        return torch.cat(pairs), torch.cat(rows)

    def _grouped(self, x_TM, expert_TK):
        """Return the same by one grouped product per projection."""
        sorted_P, pairs = expert_TK.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts, device=x_TM.device)
        ends = (sorted_P[None] <= experts[:, None]).sum(1, dtype=torch.int32)

        def product(rows, name):
            out = functional.grouped_mm(rows, getattr(self, name).transpose(1, 2), offs=ends)
            bias = getattr(self, f"{name}_bias", None)
            return out if bias is None else out + bias[sorted_P]

        hidden = product(x_TM[pairs // expert_TK.shape[1]], self.up_name)
        return pairs, product(self.activate(hidden), "down_proj")


def inference_layer(config: LayerConfig) -> FairseqMoEBlock:
    """Return a layer with experts on the meta device: [..., M] -> [..., M]; nothing is dropped."""
    with torch.device("meta"):
        return FairseqMoEBlock(config, InferenceExperts(config))


class InferenceAttention(nn.Module):
    """Attention: [B, L, M] and what may be seen, bool [B, 1, L+1, L+1] -> [B, L, M].

    Queries, keys and values get a last row of zeros: torch's attention on CPUs divides by their
    number, and a text without tokens would end the process.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        dim, self.heads = config.hidden_size, config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(dim, dim))

    def forward(self, x: Tensor, visible: Tensor) -> tuple[Tensor, None]:
        # explicit, because torch infers no size of an empty tensor
        shape = (self.heads, x.shape[-1] // self.heads)
        query, key, value = (
            functional.pad(project(x).unflatten(-1, shape).transpose(1, 2), (0, 0, 0, 1))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.out_proj(out[:, :, :-1].transpose(1, 2).flatten(2)), None


class InferenceDecoder(nn.Module):
    """Decoder: tokens int64 [B, L] -> features [B, L, M]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dim = config.hidden_size
        self.scale = math.sqrt(dim) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(config.vocab_size, dim)
        self.embed_positions = make_positions(config)
        self.layers = nn.ModuleList(
            FairseqMoEDecoderLayer(config, number, InferenceAttention(config), InferenceExperts)
            for number in range(config.num_hidden_layers)
        )
        self.layer_norm = nn.LayerNorm(dim) if config.final_layer_norm else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = tokens != _PAD
        order = torch.arange(tokens.shape[1] + 1, device=tokens.device)
        seen = functional.pad(is_token, (0, 1))[:, None, :] & (order[:, None] >= order)
        # padding sees itself, so that no row is a mean of nothing
        visible = (seen | (order[:, None] == order))[:, None]
        x = self.embed_tokens(tokens) * self.scale
        if self.embed_positions is not None:
            position_ids = is_token.cumsum(1) * is_token - 1
            x = x + self.embed_positions(position_ids).to(x.dtype)
        for layer in self.layers:
            x = layer(x, visible=visible)
        return self.layer_norm(x)


class InferenceModel(nn.Module):
    """Language model on the meta device: tokens int64 [B, L] -> logits [B, L, V]; 1 is padding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.lm_head = None
        with torch.device("meta"):
            self.model = InferenceDecoder(config)
            if not config.tie_word_embeddings:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        output = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return functional.linear(self.model(tokens), output.weight)
