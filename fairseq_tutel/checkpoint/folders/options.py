"""Options of fairseq's models, by the ``config.json`` of a folder."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ..layout import CheckpointError

# fairseq's names of activations -> those of transformers
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "linear": "linear",
    "relu": "relu",
    "relu_squared": "relu2",
    "tanh": "tanh",
}
# numbers of the symbols <s>, <pad> and </s> in every dictionary of fairseq
SPECIAL_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}

_CHOICES = {
    "group_score": ("top2", "max"),
    "position_embedding": ("sinusoidal", "learned", "none"),
    "score_function": ("softmax", "sigmoid"),
}


def language_model_options(config: Any) -> dict[str, Any]:
    """Return options of ``transformer_lm_gpt_moe``; CheckpointError for a field that has none."""
    for name, values in _CHOICES.items():
        if getattr(config, name) not in values:
            given = f"{name} {getattr(config, name)!r}"
            raise CheckpointError(f"{given} cannot be imported, only {', '.join(values)}")
    network, layers = config.expert_network, config.num_hidden_layers
    freq = min(config.moe_layers, default=layers) + 1
    if list(config.moe_layers) != list(range(freq - 1, layers, freq)):
        raise CheckpointError(
            f"moe_layers {list(config.moe_layers)} cannot be imported: fairseq's model has experts "
            "in every N-th layer"
        )
    options = {
        "decoder_layers": layers,
        "decoder_embed_dim": config.hidden_size,
        "decoder_ffn_embed_dim": config.ffn_dim,
        "decoder_attention_heads": config.num_attention_heads,
        "activation_fn": _activation(config),
        "share_decoder_input_output_embed": config.tie_word_embeddings,
        "decoder_learned_pos": config.position_embedding == "learned",
        "no_token_positional_embeddings": config.position_embedding == "none",
        "no_scale_embedding": not config.scale_embedding,
        "no_decoder_final_norm": not config.final_layer_norm,
        "moe_freq": freq,
        "moe_expert_count": config.num_experts,
        "moe_top_k": config.num_experts_per_tok,
        "moe_second_expert_policy": "all",
        "moe_expert_ffn_dim": config.moe_ffn_dim,
        "moe_expert_network": network,
        "moe_shared_expert_ffn_dim": config.shared_expert_dim,
        "moe_shared_expert_gate": config.shared_expert_gate,
        "moe_score_function": config.score_function,
        "moe_num_expert_groups": config.num_expert_groups,
        "moe_top_groups": config.top_groups,
        "moe_group_score": config.group_score,
        "moe_unnormalized_weights": config.num_experts_per_tok > 1 and not config.norm_topk_prob,
        "moe_load_bias": "frozen" if config.router_load_bias else "none",
        "moe_gating_use_model_dtype": not config.router_fp32,
        "moe_route_scale": config.routed_scale,
        "moe_fom": 1 - config.moe_output_scale,
    }
    if network != "ffn":
        options[f"moe_{network}_bias"] = config.expert_bias
    if network == "clamped_swiglu":
        for name in ("limit", "alpha", "shift"):
            options[f"moe_{network}_{name}"] = getattr(config, f"gate_{name}")
    return options


def nllb_options(config: Any) -> dict[str, Any]:
    """Return options of ``transformer_moe``; CheckpointError for a field without an option."""
    _refuse(config, "router_bias", lambda value: not value, "a router has no bias")
    _refuse(config, "tie_word_embeddings", bool, "a model shares all its embeddings")
    fraction = "moe_eval_capacity_token_fraction"
    _refuse(config, fraction, lambda f: 0 < f <= 1, "no capacity is a number of tokens")
    options = {
        "share_all_embeddings": True,
        "max_source_positions": config.max_position_embeddings,
        "max_target_positions": config.max_position_embeddings,
        "activation_fn": _activation(config),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "no_scale_embedding": not config.scale_embedding,
        "moe_freq": 0,
        "moe_expert_count": config.num_experts,
        "moe_second_expert_policy": config.second_expert_policy,
        "moe_normalize_gate_prob_before_dropping": config.normalize_router_prob_before_dropping,
        "moe_batch_prioritized_routing": config.batch_prioritized_routing,
        "moe_gating_use_model_dtype": config.router_dtype != "float32",
        "moe_eom": config.moe_token_dropout,
        "use_moe_pad_mask": not config.router_ignore_padding_tokens,
    }
    if getattr(config, fraction) < 1:  # with 1 nothing is dropped
        options[fraction] = getattr(config, fraction)
    for side in ("encoder", "decoder"):
        options |= {
            f"{side}_layers": getattr(config, f"{side}_layers"),
            f"{side}_embed_dim": config.d_model,
            f"{side}_ffn_embed_dim": getattr(config, f"{side}_ffn_dim"),
            f"{side}_attention_heads": getattr(config, f"{side}_attention_heads"),
            f"{side}_normalize_before": True,
            f"{side}_moe_freq": getattr(config, f"{side}_sparse_step"),
        }
    return options


# defaults of an export's configuration; transformers leaves fields with these values out
LANGUAGE_MODEL_DEFAULTS = {
    "activation_function": "gelu",
    "expert_bias": True,
    "expert_network": "ffn",
    "ffn_dim": 256,
    "final_layer_norm": True,
    "gate_alpha": 1.702,
    "gate_limit": 7.0,
    "gate_shift": 1.0,
    "group_score": "top2",
    "hidden_size": 64,
    "max_position_embeddings": 1024,
    "moe_ffn_dim": 256,
    "moe_layers": [1],
    "moe_output_scale": 1.0,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_expert_groups": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "position_embedding": "sinusoidal",
    "routed_scale": 1.0,
    "router_fp32": True,
    "router_load_bias": False,
    "scale_embedding": True,
    "score_function": "softmax",
    "shared_expert_dim": 0,
    "shared_expert_gate": False,
    "tie_word_embeddings": True,
    "top_groups": 1,
    "vocab_size": 0,
}
# defaults of transformers' NllbMoe; its config.json leaves out fields with these values
NLLB_DEFAULTS = {
    "activation_function": "relu",
    "activation_dropout": 0.0,
    "attention_dropout": 0.1,
    "batch_prioritized_routing": False,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "decoder_layers": 12,
    "decoder_sparse_step": 4,
    "dropout": 0.1,
    "d_model": 1024,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layers": 12,
    "encoder_sparse_step": 4,
    "max_position_embeddings": 1024,
    "moe_eval_capacity_token_fraction": 1.0,
    "moe_token_dropout": 0.2,
    "normalize_router_prob_before_dropping": False,
    "num_experts": 128,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "scale_embedding": True,
    "second_expert_policy": "all",
    "tie_word_embeddings": True,
    "vocab_size": 128112,
}


def read_config(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> SimpleNamespace:
    """Return a config with its defaults; CheckpointError for a field of another kind than its."""
    for name, default in defaults.items():
        value, kind = stored.get(name, default), type(default)
        fits = isinstance(value, int | float if kind is float else kind)
        if kind is list:
            fits = fits and all(type(each) is int for each in value)
        if not fits or isinstance(value, bool) != (kind is bool):
            raise CheckpointError(f"{name} {value!r} in config.json is no {kind.__name__}")
        if kind is int and value < 0:
            raise CheckpointError(f"{name} {value} in config.json must be at least 0")
    return SimpleNamespace(**{**defaults, **stored})


def _refuse(config: Any, name: str, fits: Callable[[Any], bool], why: str) -> None:
    if not fits(value := getattr(config, name)):
        raise CheckpointError(f"{name} {value} cannot be imported: in fairseq's model {why}")


def _activation(config: Any) -> str:
    names = [ours for ours, theirs in ACTIVATIONS.items() if theirs == config.activation_function]
    if not names:
        raise CheckpointError(
            f"activation_function {config.activation_function!r} cannot be imported: fairseq has "
            f"{', '.join(ACTIVATIONS)}"
        )
    return names[0]
