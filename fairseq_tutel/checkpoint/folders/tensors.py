"""Tensors of a checkpoint, by the ``config.json`` of a folder: their places there, and shapes."""

import re
from typing import Any, NamedTuple

# unused rows of fairseq's learned positions: positions count from the padding's number plus 1
_POSITIONS_BEFORE = 2
# entries of fairseq and of the layer that are no weights
_IGNORED = re.compile(
    r"(.*\.)?experts_held|(en|de)coder\.(version|embed_positions\.(_float_tensor|weights))"
)


class Place(NamedTuple):
    """Place of a stored tensor: the elements of a folder's tensor from ``start`` on."""

    name: str
    start: int = 0


class Stored(NamedTuple):
    """Place and shape of a tensor of a checkpoint."""

    place: Place
    shape: tuple[int, ...]


Tensors = dict[str, Stored]  # by name in a checkpoint or state dict


def language_model_tensors(config: Any) -> Tensors:
    """Return the tensors of a language model (``transformer_lm_gpt_moe``)."""
    dim, embedding = config.hidden_size, "model.embed_tokens.weight"
    output = embedding if config.tie_word_embeddings else "lm_head.weight"
    found = {
        "decoder.embed_tokens.weight": _stored(embedding, config.vocab_size, dim),
        "decoder.output_projection.weight": _stored(output, config.vocab_size, dim),
    }
    if config.position_embedding == "learned":
        rows = config.max_position_embeddings + _POSITIONS_BEFORE
        found["decoder.embed_positions.weight"] = _stored("model.embed_positions.weight", rows, dim)
    if config.final_layer_norm:
        found |= _inside(_norm("layer_norm", dim), "decoder.", "model.")
    sparse = _inside(layer_tensors(config), "moe_layer.", "moe.")
    dense = _inside(_ffn(dim, config.ffn_dim), "", "ffn.")
    for number in range(config.num_hidden_layers):
        layer = _norm("final_layer_norm", dim) | _attention("self_attn", dim)
        layer |= sparse if number in config.moe_layers else dense
        found |= _inside(layer, f"decoder.layers.{number}.", f"model.layers.{number}.")
    return found


def layer_tensors(config: Any) -> Tensors:
    """Return the tensors of an MoE layer of a language model."""
    count, dim, hidden = config.num_experts, config.hidden_size, config.moe_ffn_dim
    found = {"gate.wg.weight": _stored("router.weight", count, dim)}
    if config.router_load_bias:
        found["gate.load_bias"] = _stored("router.load_bias", count)
    if config.shared_expert_dim:
        ffn = _ffn(dim, config.shared_expert_dim)
        found |= _inside(ffn, "shared_expert.", "shared_expert.")
    if config.shared_expert_gate:
        found["shared_expert.gate.weight"] = _stored("shared_expert_gate.weight", 1, dim)
    gated = config.expert_network != "ffn"
    up = ("gate_up_proj", ("fc_gate", "fc1")) if gated else ("up_proj", ("fc1",))
    # tensor with the matrices of all experts, those of one expert, their shape
    stacks = [(*up, hidden, dim), ("down_proj", ("fc2",), dim, hidden)]
    for expert in range(count):
        for stack, parts, rows, columns in stacks:
            for number, part in enumerate(parts, start=expert * len(parts)):
                place = Place(f"ffn_experts.{stack}", number * rows * columns)
                found[f"experts.{expert}.{part}.weight"] = Stored(place, (rows, columns))
                if config.expert_bias:
                    place = Place(f"ffn_experts.{stack}_bias", number * rows)
                    found[f"experts.{expert}.{part}.bias"] = Stored(place, (rows,))
    return found


def nllb_tensors(config: Any) -> Tensors:
    """Return the tensors of a translation model (``transformer_moe``), in NllbMoe's folder."""
    dim = config.d_model
    # all embeddings and the output projection are one tensor
    names = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    embedding = _stored("model.shared.weight", config.vocab_size, dim)
    found = {f"{name}.weight": embedding for name in names}
    for side in ("encoder", "decoder"):
        layers, hidden, step = (
            getattr(config, f"{side}_{name}") for name in ("layers", "ffn_dim", "sparse_step")
        )
        common = _norm("final_layer_norm", dim, "ff_layer_norm") | _attention("self_attn", dim)
        if side == "decoder":
            common |= _attention("encoder_attn", dim, "cross_attention")
        ffn = _ffn(dim, hidden)
        moe = {"gate.wg.weight": _stored("router.classifier.weight", config.num_experts, dim)}
        for expert in range(config.num_experts):
            moe |= _inside(ffn, f"experts.{expert}.", f"experts.expert_{expert}.")
        dense, sparse = _inside(ffn, "", "ffn."), _inside(moe, "moe_layer.", "ffn.")
        for number in range(layers):
            layer = common | (sparse if step > 0 and (number + 1) % step == 0 else dense)
            name = f"{side}.layers.{number}."
            found |= _inside(layer, name, f"model.{name}")
        found |= _inside(_norm("layer_norm", dim), f"{side}.", f"model.{side}.")
    return found


def is_no_weight(key: str) -> bool:
    """Return whether an entry of a state dict is not a weight."""
    return _IGNORED.fullmatch(key) is not None


def _stored(name: str, *shape: int) -> Stored:
    return Stored(Place(name), shape)


def _inside(tensors: Tensors, prefix: str, theirs: str) -> Tensors:
    """Return the tensors with a prefix to their names, and another one to the folder's names."""
    return {
        f"{prefix}{key}": Stored(Place(f"{theirs}{name}", start), shape)
        for key, ((name, start), shape) in tensors.items()
    }


def _attention(name: str, dim: int, theirs: str = "self_attn") -> Tensors:
    found = _norm(f"{name}_layer_norm", dim, f"{theirs}_layer_norm")
    for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
        found |= _inside(_linear(part, dim, dim), f"{name}.", f"{theirs}.")
    return found


def _ffn(dim: int, hidden: int) -> Tensors:
    return _linear("fc1", hidden, dim) | _linear("fc2", dim, hidden)


def _linear(name: str, rows: int, columns: int) -> Tensors:
    weight, bias = f"{name}.weight", f"{name}.bias"
    return {weight: _stored(weight, rows, columns), bias: _stored(bias, rows)}


def _norm(name: str, dim: int, theirs: str | None = None) -> Tensors:
    return {f"{name}.{end}": _stored(f"{theirs or name}.{end}", dim) for end in ("weight", "bias")}
