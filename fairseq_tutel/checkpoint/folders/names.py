"""Map names of tensors in checkpoints and state dicts to those in folders of transformers."""

import re
from typing import Any, NamedTuple

_LAYER = r"decoder\.layers\.(\d+)\."
_DENSE = (
    (r"decoder\.(embed_tokens|embed_positions)\.weight", r"model.\1.weight"),
    (
        _LAYER + r"(self_attn\.\w+|self_attn_layer_norm|final_layer_norm)\.(weight|bias)",
        r"model.layers.\1.\2.\3",
    ),
    (_LAYER + r"(fc[12])\.(weight|bias)", r"model.layers.\1.ffn.\2.\3"),
    (r"decoder\.layer_norm\.(weight|bias)", r"model.layer_norm.\1"),
    (r"decoder\.output_projection\.weight", r"lm_head.weight"),
)
# names inside an MoE layer
_MOE = (
    (r"gate\.wg\.weight", r"router.weight"),
    (r"gate\.load_bias", r"router.load_bias"),
    (r"shared_expert\.(fc[12])\.(weight|bias)", r"shared_expert.\1.\2"),
    (r"shared_expert\.gate\.weight", r"shared_expert_gate.weight"),
)
_EXPERT = re.compile(r"experts\.(\d+)\.(fc_gate|fc1|fc2)\.(weight|bias)")
# transformers' NllbMoe; all embeddings and the output projection are one tensor
_LAYER_OF = r"((?:en|de)coder\.layers\.\d+)\."
_NLLB = (
    (
        r"encoder\.embed_tokens\.weight|decoder\.(?:embed_tokens|output_projection)\.weight",
        r"model.shared.weight",
    ),
    (_LAYER_OF + r"(self_attn(?:\.\w+|_layer_norm)\.(?:weight|bias))", r"model.\1.\2"),
    (_LAYER_OF + r"encoder_attn((?:\.\w+|_layer_norm)\.\w+)", r"model.\1.cross_attention\2"),
    (_LAYER_OF + r"final_layer_norm\.(\w+)", r"model.\1.ff_layer_norm.\2"),
    (_LAYER_OF + r"(fc[12]\.\w+)", r"model.\1.ffn.\2"),
    (_LAYER_OF + r"moe_layer\.gate\.wg\.weight", r"model.\1.ffn.router.classifier.weight"),
    (_LAYER_OF + r"moe_layer\.experts\.(\d+)\.(fc[12]\.\w+)", r"model.\1.ffn.experts.expert_\2.\3"),
    (r"((?:en|de)coder\.layer_norm\.\w+)", r"model.\1"),
)
# entries of fairseq and of the layer that are no weights
_IGNORED = re.compile(
    r"(.*\.)?experts_held|(en|de)coder\.(version|embed_positions\.(_float_tensor|weights))"
)


class Place(NamedTuple):
    """Place of a stored tensor: the elements of a folder's tensor from ``start`` on."""

    name: str
    start: int = 0


def place_in_layer(key: str, config: Any) -> Place | None:
    """Return the place of a tensor by its name in an MoE layer's state dict, or None."""
    match = _EXPERT.fullmatch(key)
    if match is None:
        return _renamed(key, _MOE)
    expert, part, kind = match.groups()
    gated = config.expert_network != "ffn"
    stacked = "down_proj" if part == "fc2" else "gate_up_proj" if gated else "up_proj"
    size = config.hidden_size if part == "fc2" else config.moe_ffn_dim
    if kind == "weight":
        size = config.hidden_size * config.moe_ffn_dim
    number = int(expert)
    if stacked == "gate_up_proj":  # fc_gate, then fc1
        number = 2 * number + (part == "fc1")
    return Place(f"ffn_experts.{stacked}{'_bias' if kind == 'bias' else ''}", number * size)


def place_in_language_model(key: str, config: Any) -> Place | None:
    """Return the place of a tensor by its name in a checkpoint; None if it has none."""
    if config.tie_word_embeddings and key == "decoder.output_projection.weight":
        key = "decoder.embed_tokens.weight"
    match = re.fullmatch(_LAYER + r"moe_layer\.(.+)", key)
    if match is None:
        return _renamed(key, _DENSE)
    place = place_in_layer(match[2], config)
    return place and place._replace(name=f"model.layers.{match[1]}.moe.{place.name}")


def place_in_nllb(key: str) -> Place | None:
    """Return the place of a tensor of a translation model in transformers' NllbMoe, or None."""
    return _renamed(key, _NLLB)


def is_no_weight(key: str) -> bool:
    """Return whether an entry of a state dict is not a weight."""
    return _IGNORED.fullmatch(key) is not None


def _renamed(key: str, table) -> Place | None:
    found = (match.expand(name) for old, name in table if (match := re.fullmatch(old, key)))
    name = next(found, None)
    return name and Place(name)
