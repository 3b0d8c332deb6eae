"""Names and shapes of the tensors in a checkpoint, by the ``config.json`` of a folder."""

from collections.abc import Container, Sequence
from typing import Any

Shapes = dict[str, tuple[int, ...]]

# unused rows of fairseq's learned positions: positions count from the padding's number plus 1
_POSITIONS_BEFORE = 2


def language_model_shapes(config: Any) -> Shapes:
    """Return the tensors of a language model (``transformer_lm_gpt_moe``)."""
    dim = config.hidden_size
    moe = _moe(config.num_experts, dim, config.moe_ffn_dim, config.expert_network != "ffn",
               config.expert_bias)  # fmt: skip
    if config.router_load_bias:
        moe["gate.load_bias"] = (config.num_experts,)
    if config.shared_expert_dim:
        moe |= _prefixed("shared_expert.", _ffn(dim, config.shared_expert_dim))
    if config.shared_expert_gate:
        moe["shared_expert.gate.weight"] = (1, dim)
    names = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    shapes: Shapes = dict.fromkeys(names, (config.vocab_size, dim))
    if config.position_embedding == "learned":
        rows = config.max_position_embeddings + _POSITIONS_BEFORE
        shapes["decoder.embed_positions.weight"] = (rows, dim)
    if config.final_layer_norm:
        shapes |= _norm("decoder.layer_norm", dim)
    layers = config.num_hidden_layers
    return shapes | _layers("decoder", layers, dim, config.ffn_dim, config.moe_layers, moe)


def nllb_shapes(config: Any) -> Shapes:
    """Return the tensors of a translation model (``transformer_moe``)."""
    dim = config.d_model
    names = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    shapes: Shapes = {f"{name}.weight": (config.vocab_size, dim) for name in names}
    for side, attentions in (
        ("encoder", ["self_attn"]),
        ("decoder", ["self_attn", "encoder_attn"]),
    ):
        layers, hidden, step = (
            getattr(config, f"{side}_{name}") for name in ("layers", "ffn_dim", "sparse_step")
        )
        sparse = range(step - 1, layers, step) if step > 0 else ()
        moe = _moe(config.num_experts, dim, hidden)
        shapes |= _layers(side, layers, dim, hidden, sparse, moe, attentions)
        shapes |= _norm(f"{side}.layer_norm", dim)
    return shapes


def _layers(
    side: str,
    count: int,
    dim: int,
    hidden: int,
    sparse: Container[int],
    moe: Shapes,
    attentions: Sequence[str] = ("self_attn",),
) -> Shapes:
    shapes: Shapes = {}
    for number in range(count):
        layer = _norm("final_layer_norm", dim)
        for attention in attentions:
            layer |= _norm(f"{attention}_layer_norm", dim)
            for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
                layer |= _linear(f"{attention}.{name}", dim, dim)
        layer |= _prefixed("moe_layer.", moe) if number in sparse else _ffn(dim, hidden)
        shapes |= _prefixed(f"{side}.layers.{number}.", layer)
    return shapes


def _moe(num_experts: int, dim: int, hidden: int, gated: bool = False, bias: bool = True) -> Shapes:
    expert = _ffn(dim, hidden, bias) | (_linear("fc_gate", hidden, dim, bias) if gated else {})
    shapes: Shapes = {"gate.wg.weight": (num_experts, dim)}
    for number in range(num_experts):
        shapes |= _prefixed(f"experts.{number}.", expert)
    return shapes


def _ffn(dim: int, hidden: int, bias: bool = True) -> Shapes:
    return _linear("fc1", hidden, dim, bias) | _linear("fc2", dim, hidden, bias)


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _norm(name: str, dim: int) -> Shapes:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}
