"""fairseq's GPT-style decoder with mixture-of-experts layers, for transformers 5.

Attention goes through transformers' attention interface (eager, sdpa, ...), the experts through its
experts interface (``experts_implementation``: eager, batched_mm, grouped_mm). Nothing is dropped:
there is no capacity. There is no balance loss either, so this is for inference.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_fairseq_moe import FairseqMoEConfig

# fairseq counts positions from the number after that of its padding
_FIRST_POSITION = 2


class FairseqMoEPositions(nn.Module):
    """Sinusoidal positions: [..., L] -> fp32 [..., L, M], sines first (Vaswani et al., 2017).

    Computed where they are needed, so that no length is fixed.
    """

    def __init__(self, config):
        super().__init__()
        self.dim = config.hidden_size

    def forward(self, position_ids):
        half = self.dim // 2
        step = -math.log(10000) / (half - 1)
        rate = torch.exp(torch.arange(half, dtype=torch.float, device=position_ids.device) * step)
        angle = (position_ids + _FIRST_POSITION)[..., None].float() * rate
        waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
        return nn.functional.pad(waves, (0, self.dim % 2))


class FairseqMoELearnedPositions(nn.Embedding):
    """Learned positions: [..., L] -> [..., L, M]."""

    def __init__(self, config):
        super().__init__(config.max_position_embeddings + _FIRST_POSITION, config.hidden_size)

    def forward(self, position_ids):
        return super().forward(position_ids + _FIRST_POSITION)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """[B, H, L, D] each -> [B, L, H, D] and the weights."""
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class FairseqMoEAttention(nn.Module):
    """Causal attention with biases, all heads with keys and values of their own."""

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


class FairseqMoERouter(nn.Module):
    """Tokens [T, M] -> indices [T, K] and fp32 weights [T, K] of their experts."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts) if config.router_load_bias else None
        self.register_buffer("load_bias", bias)

    def forward(self, hidden_states):
        config = self.config
        if config.router_fp32:
            logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        else:
            logits = nn.functional.linear(hidden_states, self.weight).float()
        sigmoid = config.score_function == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        key = scores
        if self.load_bias is not None:
            key = (scores if sigmoid else logits) + self.load_bias.float()
        index = key.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, index)
        if config.norm_topk_prob:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.clamp(min=torch.finfo(total.dtype).eps)
        return index, weights * config.routed_scale


def _by_expert(experts, hidden_states, top_k_index, top_k_weights, compute):
    """The sum over a token's experts, one expert after the other; those without tokens are not
    read."""
    out = torch.zeros_like(hidden_states, dtype=top_k_weights.dtype)
    for expert in top_k_index.unique().tolist():
        if expert >= experts.num_experts:
            continue
        token, choice = torch.where(top_k_index == expert)
        rows = compute(hidden_states[token], expert)
        out.index_add_(0, token, rows * top_k_weights[token, choice, None])
    return out.to(hidden_states.dtype)


@use_experts_implementation(has_gate=False, has_bias=True)
class FairseqMoEExperts(nn.Module):
    """Experts without a gate: down(act(up(x))), with biases."""

    def __init__(self, config):
        super().__init__()
        count, dim, hidden = config.num_experts, config.hidden_size, config.moe_ffn_dim
        self.num_experts = count
        self.up_proj = nn.Parameter(torch.empty(count, hidden, dim))
        self.up_proj_bias = nn.Parameter(torch.empty(count, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, dim, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(count, dim))
        self.act_fn = ACT2FN[config.activation_function]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return _by_expert(self, hidden_states, top_k_index, top_k_weights, self._compute)

    def _compute(self, x, expert):
        linear = nn.functional.linear
        hidden = self.act_fn(linear(x, self.up_proj[expert], self.up_proj_bias[expert]))
        return linear(hidden, self.down_proj[expert], self.down_proj_bias[expert])


class _GatedExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        count, dim, hidden = config.num_experts, config.hidden_size, config.moe_ffn_dim
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * hidden, dim))
        self.down_proj = nn.Parameter(torch.empty(count, dim, hidden))
        if config.expert_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * hidden))
            self.down_proj_bias = nn.Parameter(torch.empty(count, dim))
        self.act_fn = ACT2FN[{"swiglu": "silu", "geglu": "gelu"}[config.expert_network]]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return _by_expert(self, hidden_states, top_k_index, top_k_weights, self._compute)

    def _compute(self, x, expert):
        up_bias, down_bias = (
            self._parameters[name][expert] if name in self._parameters else None
            for name in ("gate_up_proj_bias", "down_proj_bias")
        )
        both = nn.functional.linear(x, self.gate_up_proj[expert], up_bias)
        gate, up = both.chunk(2, dim=-1)
        return nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert], down_bias)


@use_experts_implementation
class FairseqMoEGatedExperts(_GatedExperts):
    """Experts with a gate: down(act(gate(x)) * up(x))."""


@use_experts_implementation(has_bias=True)
class FairseqMoEGatedExpertsWithBias(_GatedExperts):
    """Those with biases."""


def make_experts(config):
    """The experts' module that a config asks for."""
    if config.expert_network == "ffn":
        return FairseqMoEExperts(config)
    return (FairseqMoEGatedExpertsWithBias if config.expert_bias else FairseqMoEGatedExperts)(
        config
    )


class FairseqMoEFeedForward(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, config, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, config.hidden_size)
        self.act_fn = ACT2FN[config.activation_function]

    def forward(self, hidden_states):
        return self.fc2(self.act_fn(self.fc1(hidden_states)))


class FairseqMoEBlock(nn.Module):
    """Router, experts, and the expert of all tokens if there is one."""

    def __init__(self, config):
        super().__init__()
        self.output_scale = config.moe_output_scale
        self.router = FairseqMoERouter(config)
        # not `experts`: vLLM puts another network in the place of a child of that name
        self.ffn_experts = make_experts(config)
        self.shared_expert = None
        if config.shared_expert_dim:
            self.shared_expert = FairseqMoEFeedForward(config, config.shared_expert_dim)

    def forward(self, hidden_states):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights = self.router(tokens)
        out = self.ffn_experts(tokens, index, weights)
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens)
        return (out * self.output_scale).view(hidden_states.shape)


class FairseqMoEDecoderLayer(nn.Module):
    """Attention, then a feed-forward network or experts; a norm before, a residual beside each."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = FairseqMoEAttention(config, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        sparse = layer_idx in config.moe_layers
        self.moe = FairseqMoEBlock(config) if sparse else None
        self.ffn = None if sparse else FairseqMoEFeedForward(config, config.ffn_dim)

    def forward(self, hidden_states, **kwargs):
        out, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + out
        compute = self.ffn if self.moe is None else self.moe
        return hidden_states + compute(self.final_layer_norm(hidden_states))


class FairseqMoEPreTrainedModel(PreTrainedModel):
    """What the two models have in common."""

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
        kinds = {"sinusoidal": FairseqMoEPositions, "learned": FairseqMoELearnedPositions}
        kind = kinds.get(config.position_embedding)
        self.embed_positions = None if kind is None else kind(config)
        self.layers = nn.ModuleList(
            [FairseqMoEDecoderLayer(config, number) for number in range(config.num_hidden_layers)]
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
        """[B, L] or [1, L]: tokens count from 0 behind the padding that a mask marks."""
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
        # generation gives positions to models that name them; its masks need not tell them
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
