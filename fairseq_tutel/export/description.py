"""What is exported, as plain values: a router and its experts, and a language model around them.

Whatever the exported forms have no place for is refused here, by the name of its option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import EXPERTS, MoEConfig
from .errors import ExportError

# fairseq's names of activations -> those of transformers
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "linear": "linear",
    "relu": "relu",
    "relu_squared": "relu2",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
NETWORKS = ("ffn", "swiglu", "geglu")


@dataclass(frozen=True)
class MoEDescription:
    """A layer with experts, as it evaluates without a capacity.

    Attributes:
        normalized: whether the K scores of a token are divided by their sum.
        routed_scale, output_scale: factors of an expert's weight, and of the layer's output.
        gating_fp32: whether the router's logits are computed in fp32 from weights of any dtype.
        shared_dim: hidden width of an expert of all tokens, 0 for none.
    """

    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    network: str
    bias: bool
    activation: str
    score_function: str
    normalized: bool
    load_bias: bool
    gating_fp32: bool
    routed_scale: float
    output_scale: float
    shared_dim: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors by their names in an exported layer."""
        experts, dim, hidden = self.num_experts, self.model_dim, self.hidden_dim
        up, rows = ("up_proj", hidden) if self.network == "ffn" else ("gate_up_proj", 2 * hidden)
        found = {"router.weight": (experts, dim)}
        if self.load_bias:
            found["router.load_bias"] = (experts,)
        found[f"ffn_experts.{up}"] = (experts, rows, dim)
        found["ffn_experts.down_proj"] = (experts, dim, hidden)
        if self.bias:
            found[f"ffn_experts.{up}_bias"] = (experts, rows)
            found["ffn_experts.down_proj_bias"] = (experts, dim)
        if self.shared_dim:
            found |= _feed_forward("shared_expert", dim, self.shared_dim)
        return found


@dataclass(frozen=True)
class ModelDescription:
    """A GPT-style decoder, some of whose layers have experts.

    Attributes:
        moe_layers: their numbers, from 0.
        positions: "sinusoidal", "learned" or "none".
        tied: whether the output projection is the embedding.
        prompt: number of the symbol that stands before every text: that of ``</s>``, or ``<s>``.
    """

    vocab_size: int
    model_dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    activation: str
    moe_layers: tuple[int, ...]
    moe: MoEDescription
    positions: str
    max_positions: int
    scale_embedding: bool
    final_norm: bool
    tied: bool
    prompt: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors by their names in an exported model."""
        dim = self.model_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, dim)}
        if self.positions == "learned":
            # positions are counted from the number after that of the padding
            found["model.embed_positions.weight"] = (self.max_positions + 2, dim)
        for number in range(self.num_layers):
            layer = f"model.layers.{number}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                found |= _affine(f"{layer}.self_attn.{name}", dim, dim)
            for name in ("self_attn_layer_norm", "final_layer_norm"):
                found |= _affine(f"{layer}.{name}", dim)
            if number in self.moe_layers:
                of_moe = self.moe.shapes().items()
                found |= {f"{layer}.moe.{name}": shape for name, shape in of_moe}
            else:
                found |= _feed_forward(f"{layer}.ffn", dim, self.ffn_dim)
        if self.final_norm:
            found |= _affine("model.layer_norm", dim)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab_size, dim)
        return found


def _affine(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _feed_forward(name: str, dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return _affine(f"{name}.fc1", hidden, dim) | _affine(f"{name}.fc2", dim, hidden)


def describe_moe(
    config: MoEConfig,
    *,
    model_dim: int,
    hidden_dim: int,
    network: str = "ffn",
    network_options: Any = None,
    activation: str = "gelu",
    shared_dim: int = 0,
) -> MoEDescription:
    """How a layer evaluates, from its options; without a capacity, as fairseq generates.

    Raises:
        ExportError: names a router, a network, an activation or null experts.
    """
    if config.router != "linear":
        raise ExportError(f"the {config.router} router (--moe-router) cannot be exported")
    if config.null_experts:
        raise ExportError(f"--moe-null-experts {config.null_experts} cannot be exported")
    if network not in NETWORKS:
        raise ExportError(f"experts of the network {network!r} cannot be exported")
    options = EXPERTS.options(network, network_options)
    return MoEDescription(
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        network=network,
        bias=network == "ffn" or options.bias,
        activation=activation_name(activation),
        score_function=config.score_function,
        normalized=config.top_k > 1 and not config.unnormalized_weights,
        load_bias=config.load_bias != "none",
        gating_fp32=config.gating_fp32,
        # evaluation multiplies by the share that output masks keep
        routed_scale=config.route_scale * (1 - config.expert_output_masking),
        output_scale=1 - config.final_output_masking,
        shared_dim=shared_dim,
    )


def activation_name(name: str) -> str:
    """Of transformers; ExportError for one that it does not have."""
    if name not in ACTIVATIONS:
        raise ExportError(f"the activation {name!r} cannot be exported")
    return ACTIVATIONS[name]
