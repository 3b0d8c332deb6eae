"""Restoration of a model, or of its state dict, to the form of transformers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...distributed import process_world, sum_tensor_over_ranks_, take_slice
from ...moe import MoELayer
from ...moe.model import unwrap
from ...training import full_state_dict
from .replace import KeptRouter


@torch.no_grad()
def restore_moe(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Put the blocks back in place, with the current weights of all experts on every rank.

    Collective. Modes, dtypes and devices are those of the layers.

    Args:
        model (nn.Module): the model that ``replace_moe`` changed, wrapped or not.
        blocks (dict): result of ``replace_moe``.

    Raises:
        ValueError: a layer has a load bias, which the original router cannot hold.
    """
    model = unwrap(model)
    for name, layer in _layers(model, blocks).items():
        block, (gate_up, down) = blocks[name], _all_experts(layer)
        block.experts.to(gate_up.dtype).to_empty(device=gate_up.device)
        block.experts.gate_up_proj.copy_(gate_up.flatten(1, 2))
        block.experts.down_proj.copy_(down)
        block.experts.gate_up_proj.requires_grad_(layer.experts.fc1_weight.requires_grad)
        block.experts.down_proj.requires_grad_(layer.experts.fc2_weight.requires_grad)
        block.gate = layer.gate.wg
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, block.train(layer.training))


def original_state_dict(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the state dict with transformers' names and all experts, on rank 0's CPU. Collective.

    Pass it to ``model.save_pretrained(folder, state_dict=...)``. Without that argument
    ``save_pretrained`` writes this package's names, which transformers does not load. The model
    stays as it is.

    Args:
        model (nn.Module): the model that ``replace_moe`` changed, wrapped or not.
        blocks (dict): result of ``replace_moe``.

    Returns:
        dict: tensors by name; {} on other ranks than 0.

    Raises:
        ValueError: a layer has a load bias, which the original router cannot hold.
    """
    layers = _layers(unwrap(model), blocks)
    state = full_state_dict(model)
    if process_world()[0] > 0:
        return {}
    for name, layer in layers.items():
        experts = range(layer.groups.num_experts)
        gate, up, down = (
            [state.pop(f"{name}.experts.{expert}.{each}.weight") for expert in experts]
            for each in ("fc_gate", "fc1", "fc2")
        )
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        state[f"{name}.experts.gate_up_proj"] = torch.stack(pairs)
        state[f"{name}.experts.down_proj"] = torch.stack(down)
        state[f"{name}.gate.weight"] = state.pop(f"{name}.gate.wg.weight")
        state.pop(f"{name}.gate.load_bias", None)  # zeros
    first: dict[int, str] = {}
    for key, param in unwrap(model).named_parameters(remove_duplicate=False):
        one = first.setdefault(id(param), key)
        if key in state:
            state[key] = state[one]  # tied parameters stay one tensor
    return state


def _layers(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, MoELayer]:
    """Return the layers at the places of the blocks; raise ValueError for a load bias."""
    layers = {name: model.get_submodule(name) for name in blocks}
    for name, layer in layers.items():
        if not (isinstance(layer, MoELayer) and isinstance(layer.gate, KeptRouter)):
            raise ValueError(f"{name} is not a layer of replace_moe, but {type(layer).__name__}")
        if layer.gate.load_bias is not None and layer.gate.load_bias.any():
            raise ValueError(
                f"{name} chooses experts by a load bias, which the original router cannot hold: "
                "drop the bias with layer.gate.load_bias.zero_()"
            )
    return layers


def _all_experts(layer: MoELayer) -> tuple[Tensor, Tensor]:
    """Return [E, 2, F, M] and [E, M, F] with the experts of all ranks. Collective."""
    groups, experts = layer.groups, layer.experts
    num_experts, hidden, model_dim = groups.num_experts, experts.hidden_dim, experts.model_dim
    gate_up = experts.fc1_weight.new_zeros((num_experts, 2, hidden, model_dim))
    down = experts.fc2_weight.new_zeros((num_experts, model_dim, hidden))
    whole = {"fc_gate.weight": gate_up[:, 0], "fc1.weight": gate_up[:, 1], "fc2.weight": down}
    if groups.rank < groups.ep_size * groups.num_slices:  # one rank of each expert or slice
        for key, part in experts.state_dict().items():
            slot, _, end = key.partition(".")
            target = whole[end][groups.local_experts[int(slot)]]
            take_slice(target, end, groups.slice_index, groups.num_slices).copy_(part)
    for tensor in (gate_up, down):
        # a sum of bytes is exact, because all other ranks have zeros
        sum_tensor_over_ranks_(tensor.view(torch.uint8))
    return gate_up, down
