"""Names of tensors: those in checkpoints and state dicts, and those in exported models."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from .description import MoEDescription

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
# of an MoE layer alone
_MOE = (
    (r"gate\.wg\.weight", r"router.weight"),
    (r"gate\.load_bias", r"router.load_bias"),
    (r"shared_expert\.(fc[12])\.(weight|bias)", r"shared_expert.\1.\2"),
)
_EXPERT = re.compile(r"experts\.(\d+)\.(fc_gate|fc1|fc2)\.(weight|bias)")
# what fairseq and the layer keep beside weights
_IGNORED = re.compile(
    r"(.*\.)?experts_held|decoder\.(version|embed_positions\.(_float_tensor|weights))"
)


class Place(NamedTuple):
    """Where a stored tensor goes: a run of an exported tensor's elements, from ``start`` on."""

    name: str
    start: int = 0


def place_in_layer(key: str, moe: MoEDescription) -> Place | None:
    """Of a tensor of an MoE layer, by its name in the layer's state dict; None: nowhere.

    An expert's tensors have places in those of all experts; a gate stands before what it gates.
    """
    match = _EXPERT.fullmatch(key)
    if match is None:
        return _renamed(key, _MOE)
    expert, part, kind = match.groups()
    gated = moe.network != "ffn"
    stacked = "down_proj" if part == "fc2" else "gate_up_proj" if gated else "up_proj"
    name = f"ffn_experts.{stacked}{'_bias' if kind == 'bias' else ''}"
    shape = moe.shapes().get(name)
    if shape is None:
        return None
    size = torch.Size(shape[1:]).numel()
    return Place(name, int(expert) * size + (size // 2 if gated and part == "fc1" else 0))


def place_in_model(key: str, moe: MoEDescription) -> Place | None:
    """Of a tensor of a whole model, by its name in checkpoints; None: nowhere."""
    match = re.fullmatch(_LAYER + r"moe_layer\.(.+)", key)
    if match is None:
        return _renamed(key, _DENSE)
    place = place_in_layer(match[2], moe)
    return place and place._replace(name=f"model.layers.{match[1]}.moe.{place.name}")


def is_no_weight(key: str) -> bool:
    """Whether a state dict's entry is something else than a weight."""
    return _IGNORED.fullmatch(key) is not None


def _renamed(key: str, table) -> Place | None:
    found = (match.expand(name) for old, name in table if (match := re.fullmatch(old, key)))
    name = next(found, None)
    return name and Place(name)
