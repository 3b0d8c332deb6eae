"""fairseq's GPT-style decoder with mixture-of-experts layers, for transformers 5.

Attention uses transformers' attention interface (eager, sdpa, ...). Experts use its experts
interface (``experts_implementation``: eager, batched_mm, grouped_mm). There is no capacity, so no
token is dropped, and no load balancing loss: the model is for inference.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_fairseq_moe import FairseqMoEConfig
from .layers_fairseq_moe import (
    FairseqMoEDecoderLayer,
    FairseqMoEExpertWeights,
    FairseqMoERouter,
    make_positions,
)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Attend by matrix products: [B, H, L, D] each -> [B, L, H, D] and the weights."""
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class FairseqMoEAttention(nn.Module):
    """Causal multi-head attention with biases."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.num_key_value_groups = 1
        self.attention_dropout = 0.0
        self.is_causal = True
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        out, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs
        )
        return self.out_proj(out.reshape(hidden_states.shape)), weights


class _Experts(FairseqMoEExpertWeights):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Compute expert after expert; weights of experts without tokens are not read."""
        out = torch.zeros_like(hidden_states, dtype=top_k_weights.dtype)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, choice = torch.where(top_k_index == expert)
            rows = self.compute(hidden_states[token], expert)
            out.index_add_(0, token, rows * top_k_weights[token, choice, None])
        return out.to(hidden_states.dtype)


@use_experts_implementation(has_gate=False, has_bias=True)
class FairseqMoEExperts(_Experts):
    """Experts without a gate, with biases: down(act(up(x)))."""


@use_experts_implementation
class FairseqMoEGatedExperts(_Experts):
    """Experts with a gate: down(act(gate(x)) * up(x))."""


@use_experts_implementation(has_bias=True)
class FairseqMoEGatedExpertsWithBias(_Experts):
    """Experts with a gate and biases."""


def make_experts(config):
    """Return the experts' module that a config asks for."""
    if config.expert_network == "ffn":
        return FairseqMoEExperts(config)
    return (FairseqMoEGatedExpertsWithBias if config.expert_bias else FairseqMoEGatedExperts)(
        config
    )


class FairseqMoEPreTrainedModel(PreTrainedModel):
    """Base class of the two models."""

    config_class = FairseqMoEConfig
    config: FairseqMoEConfig
    base_model_prefix = "model"
    _no_split_modules = ["FairseqMoEDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # the bias moves by steps that a half-precision number loses
    _keep_in_fp32_modules_strict = ["load_bias"]

    def get_correct_experts_implementation(self, requested_experts):
        # grouped products need rows in multiples of 16 bytes: 8 numbers of any dtype
        sizes = self.config.hidden_size, self.config.moe_ffn_dim
        if requested_experts is None and any(size % 8 for size in sizes):
            requested_experts = "eager"
        return super().get_correct_experts_implementation(requested_experts)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        for name, param in module.named_parameters(recurse=False):
            if "proj" in name or isinstance(module, FairseqMoERouter):
                if name.endswith("bias"):
                    nn.init.zeros_(param)
                else:
                    nn.init.normal_(param, std=self.config.initializer_range)


class FairseqMoEModel(FairseqMoEPreTrainedModel):
    """The decoder without its output projection."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.embed_positions = make_positions(config)
        self.layers = nn.ModuleList(
            FairseqMoEDecoderLayer(
                config, number, FairseqMoEAttention(config, number), make_experts
            )
            for number in range(config.num_hidden_layers)
        )
        self.layer_norm = nn.LayerNorm(config.hidden_size) if config.final_layer_norm else None
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = self._positions(inputs_embeds, attention_mask, past_key_values)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        x = inputs_embeds * self.embed_scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids).to(x.dtype)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, past_key_values=past_key_values, **kwargs)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)

    @staticmethod
    def _positions(inputs_embeds, attention_mask, past_key_values):
        """Return positions, int64 [B, L] or [1, L], that count from 0 after the masked padding."""
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            return positions[:, -length:]
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        return (torch.arange(length, device=inputs_embeds.device) + past)[None]


class FairseqMoEForCausalLM(FairseqMoEPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = FairseqMoEModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        # generate() passes positions to models that name this argument
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        x = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values
        )
