"""All experts in one state dict, for hosts that export, push or compare a whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..checkpoint.layout import split_key
from ..distributed import (
    ExpertParallelGroups,
    SliceGather,
    full_tensor,
    gather_from_experts,
    process_world,
    shard_like,
    slice_dim,
)
from .model import moe_layers, unwrap


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that one process with all experts would have, on rank 0's CPU. Collective.

    One tensor at a time is gathered, as ``fully_shard`` ed ones are.

    Args:
        model: wrapped or not; names are those of the model inside.

    Returns:
        Tensors by name, experts by their global number; {} on the other ranks.
    """
    model = unwrap(model)
    layers = _by_prefix(model)
    rank, _ = process_world()
    full = {}
    for key, value in model.state_dict().items():
        layer = layers.get((split_key(key) or [None])[0])
        if layer is None:
            parts, names = [full_tensor(value)], [key]
        else:
            prefix, slot, rest = split_key(key)
            parts = _gather(value, key, layer.groups)
            local = layer.groups.num_local_experts
            ranks = range(layer.groups.ep_size)
            names = [f"{prefix}{number * local + slot}{rest}" for number in ranks]
        if rank == 0:
            moved = [part.detach().to("cpu", copy=True) for part in parts]
            full.update(zip(names, moved, strict=True))
    return full


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load a state dict with all experts; each rank takes its own.

    Args:
        model: wrapped or not.
        state: of :func:`full_state_dict`, or of one process; the same on every rank. Of experts in
            slices each rank takes its own.

    Raises:
        ValueError: names or shapes do not fit.
    """
    model = unwrap(model)
    layers = _by_prefix(model)
    mine, wanted = {}, set()
    for key, value in model.state_dict().items():
        layer = layers.get((split_key(key) or [None])[0])
        name = key
        if layer is not None:
            prefix, slot, rest = split_key(key)
            name = f"{prefix}{layer.groups.local_experts[slot]}{rest}"
        wanted.add(name)
        if name not in state:
            raise ValueError(f"the state dict lacks {name}")
        mine[key] = shard_like(state[name], value)
    for name in state:
        prefix, number, _ = split_key(name) or (None, 0, "")
        known = layers[prefix].groups.num_experts if prefix in layers else 0
        if name not in wanted and number >= known:
            raise ValueError(f"the state dict has {name}, which this model has not")
    try:
        model.load_state_dict(mine, strict=True)
    except RuntimeError as error:
        raise ValueError(f"the state dict does not fit this model: {error}") from None


def _gather(value: torch.Tensor, key: str, groups: ExpertParallelGroups):
    """What :func:`gather_from_experts` returns, of whole experts; nothing beside the first block.

    Collective.
    """
    if groups.num_slices > 1:
        if slice_dim(key) is not None:
            value = (SliceGather({key: value}, groups, value.device).run() or {}).get(key)
        if groups.slice_index > 0:
            return None
    return gather_from_experts(value.contiguous(), groups)


def _by_prefix(model):
    """The MoE layers by what the names of their experts begin with."""
    return {
        f"{path}.experts." if path else "experts.": layer
        for path, layer in moe_layers(model).items()
    }
