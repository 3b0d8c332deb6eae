"""State dicts with the experts of all ranks, for hosts that export or compare a whole model."""

from collections.abc import Mapping

import torch
from torch import nn

from ... import distributed
from ...checkpoint import split_key
from ...moe.model import unwrap
from .save_load import load_weights, placements_by_prefix


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the state dict of one process with all experts on rank 0's CPU. Collective.

    Tensors are gathered one at a time, sharded ones too. If experts are on several ranks,
    ``model.state_dict()`` has one rank's experts only.

    >>> from fairseq_tutel.moe import MoELayer
    >>> state = full_state_dict(MoELayer(8, num_experts=4))
    >>> len(state), state["experts.3.fc1.weight"].shape  # 4 tensors of each expert, the gate
    (17, torch.Size([32, 8]))

    Args:
        model (nn.Module): the model, wrapped or not, with or without MoE layers.

    Returns:
        dict: tensors by their names in the model inside the wrappers; {} on other ranks than 0.
    """
    model = unwrap(model)
    placements = placements_by_prefix(model)
    rank, _ = distributed.process_world()
    full = {}
    for key, value in distributed.without_held_experts(model.state_dict()).items():
        prefix, slot, rest = split_key(key) or ("", 0, "")
        groups = placements.get(prefix)
        if groups is None:
            parts, names = [distributed.full_tensor(value)], [key]
        else:
            parts, local = gather_expert(value, key, groups), groups.num_local_experts
            names = [f"{prefix}{n * local + slot}{rest}" for n in range(groups.ep_size)]
        if rank == 0 and parts is not None:
            moved = [part.detach().to("cpu", copy=True) for part in parts]
            full.update(zip(names, moved, strict=True))
    return full


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True
) -> None:
    """Load a state dict with all experts; each rank takes its own experts or slices.

    Args:
        model (nn.Module): the model, wrapped or not.
        state (dict): result of :func:`full_state_dict` or of one process's ``state_dict()``, the
            same on every rank.
        strict (bool): refuse a state dict that lacks tensors of the model (default True). With
            False the model keeps them.
    """
    model = unwrap(model)
    placements = placements_by_prefix(model)
    mine, wanted = {}, set()
    for key, value in distributed.without_held_experts(model.state_dict()).items():
        prefix, slot, rest = split_key(key) or ("", 0, "")
        groups = placements.get(prefix)
        name = key if groups is None else f"{prefix}{groups.local_experts[slot]}{rest}"
        wanted.add(name)
        if name in state:
            mine[key] = distributed.shard_like(state[name], value)
        elif strict:
            raise ValueError(f"the state dict lacks {name}")
        else:
            mine[key] = value
    for name in state:
        prefix, number, _ = split_key(name) or ("", 0, "")
        known = placements[prefix].num_experts if prefix in placements else 0
        if name not in wanted and number >= known:
            raise ValueError(f"the state dict has {name}, which this model has not")
    load_weights(model, mine, "the state dict")


def gather_expert(
    value: torch.Tensor, key: str, groups: distributed.ExpertParallelGroups
) -> list[torch.Tensor] | None:
    """Return one tensor of an expert of each rank, whole, on the first rank; None on others.

    Collective.
    """
    if groups.num_slices > 1:
        wholes = {key: value}
        if distributed.slice_dim(key) is not None:
            wholes = distributed.SliceGather(wholes, groups, value.device).run()
        if wholes is None or groups.slice_index > 0:
            return None
        value = wholes[key]
    return distributed.gather_from_experts(value.contiguous(), groups)
