"""Configs of exported layers and models, as plain values with the names of ``config.json``."""

from dataclasses import dataclass
from typing import Any

from ..checkpoint.folders import ACTIVATIONS as MODEL_ACTIVATIONS
from ..config import EXPERTS, MoEConfig
from .errors import ExportError

# those of fairseq's models, and of a layer alone
ACTIVATIONS = {**MODEL_ACTIVATIONS, "silu": "silu", "swish": "silu"}
NETWORKS = ("ffn", "swiglu", "geglu", "clamped_swiglu")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Config of a layer with experts in evaluation; see ``configuration_fairseq_moe.py``."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_ffn_dim: int
    expert_network: str
    expert_bias: bool
    gate_limit: float
    gate_alpha: float
    gate_shift: float
    activation_function: str
    shared_expert_dim: int
    shared_expert_gate: bool
    score_function: str
    num_expert_groups: int
    top_groups: int
    group_score: str
    norm_topk_prob: bool
    router_load_bias: bool
    router_fp32: bool
    routed_scale: float
    moe_output_scale: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LayerConfig):
    """Config of a GPT-style decoder, some of whose layers have experts."""

    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    moe_layers: tuple[int, ...]
    max_position_embeddings: int
    position_embedding: str
    scale_embedding: bool
    final_layer_norm: bool
    tie_word_embeddings: bool


def describe_layer(
    config: MoEConfig,
    *,
    model_dim: int,
    hidden_dim: int,
    network: str = "ffn",
    network_options: Any = None,
    activation: str = "gelu",
    shared_dim: int = 0,
    shared_gate: bool = False,
) -> LayerConfig:
    """Return the config of a layer in evaluation without a capacity, as fairseq generates.

    Args:
        config: routing options.
        model_dim, hidden_dim: M and F of an expert.
        network, network_options: name and own options of the experts' network.
        activation: fairseq's name.
        shared_dim, shared_gate: width of the shared expert (0: none), and whether it has a gate.

    Raises:
        ExportError: names a router, a network, an activation or null experts.
    """
    if config.router != "linear":
        raise ExportError(f"the {config.router} router (--moe-router) cannot be exported")
    if config.null_experts:
        raise ExportError(f"--moe-null-experts {config.null_experts} cannot be exported")
    if network not in NETWORKS:
        raise ExportError(f"experts of the network {network!r} cannot be exported")
    if activation not in ACTIVATIONS:
        raise ExportError(f"the activation {activation!r} cannot be exported")
    options = EXPERTS.options(network, network_options)
    return LayerConfig(
        hidden_size=model_dim,
        num_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
        moe_ffn_dim=hidden_dim,
        expert_network=network,
        expert_bias=network == "ffn" or options.bias,
        # of clamped_swiglu
        gate_limit=float(getattr(options, "limit", 7.0)),
        gate_alpha=float(getattr(options, "alpha", 1.702)),
        gate_shift=float(getattr(options, "shift", 1.0)),
        activation_function=ACTIVATIONS[activation],
        shared_expert_dim=shared_dim,
        shared_expert_gate=shared_gate,
        score_function=config.score_function,
        num_expert_groups=config.num_expert_groups,
        top_groups=config.top_groups,
        group_score=config.group_score,
        norm_topk_prob=config.top_k > 1 and not config.unnormalized_weights,
        router_load_bias=config.load_bias != "none",
        router_fp32=config.gating_fp32,
        # evaluation multiplies by the share that output masks keep
        routed_scale=float(config.route_scale * (1 - config.expert_output_masking)),
        moe_output_scale=float(1 - config.final_output_masking),
    )
