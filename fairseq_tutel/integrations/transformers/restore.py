"""Restoration of a model, or of its state dict, to the form of transformers."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ...distributed import process_world, sum_tensor_over_ranks_
from ...moe import MoEConfig, MoELayer
from ...moe.experts import LoRAExperts
from ...moe.model import unwrap
from ...training import full_state_dict
from .blocks import Description
from .experts import Projections
from .layers import ChosenExperts, KeptRouter, release_router, tensor_at
from .replace import matching_parameters

# options that change what a layer computes in evaluation
_IN_EVALUATION = (
    "eval_capacity_factor", "eval_capacity_token_fraction", "expert_output_masking",
    "final_output_masking", "force_load", "route_scale",
)  # fmt: skip


@torch.no_grad()
def restore_moe(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Put the blocks back in place, with the current weights of all experts on every rank.

    Collective. Modes, dtypes and devices are those of the layers.

    Args:
        model (nn.Module): the model that ``replace_moe`` changed, wrapped or not.
        blocks (dict): result of ``replace_moe``.

    Raises:
        ValueError: a layer computes something in evaluation that the original block cannot hold:
            LoRA, a load bias, a capacity, output masking, another ``route_scale``.
    """
    model = unwrap(model)
    for name, layer in layers_of(model, blocks).items():
        block, parts = blocks[name], _parts_of(layer)
        experts, down = experts_of(block), layer.experts.fc2_weight
        experts.to(down.dtype).to_empty(device=down.device)
        state = full_state_dict(layer)
        for param in experts.parameters():
            param.zero_()
        if state:  # on rank 0
            _join_experts(state, "", Projections.of(name, experts))
        for param in experts.parameters():
            # a sum of bytes is exact, because all other ranks have zeros
            sum_tensor_over_ranks_(param.data.view(torch.uint8))
        for mine, theirs in matching_parameters(layer, experts):
            theirs.requires_grad_(mine.requires_grad)
        for path, module in _kept(layer, parts):
            setattr(block, path, module)
        if parts.bias:
            bias = tensor_at(block, parts.bias)
            bias.copy_(layer.gate.load_bias.view(bias.shape))
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, block.train(layer.training))
        if isinstance(layer, ChosenExperts):
            release_router(model.get_submodule(parent))


def original_state_dict(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the state dict with transformers' names and all experts, on rank 0's CPU. Collective.

    Pass it to ``model.save_pretrained(folder, state_dict=...)``, which otherwise writes this
    package's names. The model stays as it is. The result is {} on other ranks than 0. Arguments and
    errors are those of :func:`restore_moe`.
    """
    layers = layers_of(unwrap(model), blocks)
    state = full_state_dict(model)
    if process_world()[0] > 0:
        return {}
    for name, layer in layers.items():
        parts, block = _parts_of(layer), blocks[name]
        experts, dtype = experts_of(block), state[f"{name}.experts.0.fc2.weight"].dtype
        empty = {k: torch.empty(p.shape, dtype=dtype) for k, p in experts.named_parameters()}
        _join_experts(state, f"{name}.", Projections.of(name, experts, empty))
        prefix = name if experts is block else f"{name}.experts"
        state |= {f"{prefix}.{key}": tensor for key, tensor in empty.items()}
        for path, _ in _kept(layer, parts):
            old = f"{name}.{_path_in_layer(path, parts)}."
            for key in [key for key in state if key.startswith(old)]:
                state[f"{name}.{path}.{key.removeprefix(old)}"] = state.pop(key)
        bias = state.pop(f"{name}.gate.load_bias", None)
        if parts.bias and bias is not None:
            like = tensor_at(block, parts.bias)
            state[f"{name}.{parts.bias}"] = bias.to(like.dtype).view(like.shape)
    first: dict[int, str] = {}
    for key, param in unwrap(model).named_parameters(remove_duplicate=False):
        one = first.setdefault(id(param), key)
        if key in state:
            state[key] = state[one]  # tied parameters stay one tensor
    return state


def layers_of(
    model: nn.Module, blocks: Mapping[str, nn.Module], with_lora: bool = False
) -> dict[str, MoELayer]:
    """Return the layers at the places of the blocks; raise ValueError if these cannot hold them.

    ``with_lora``: only adapters are read or written.
    """
    layers = {name: model.get_submodule(name) for name in blocks}
    for name, layer in layers.items():
        ours = isinstance(layer, ChosenExperts) or (
            isinstance(layer, MoELayer) and isinstance(layer.gate, KeptRouter)
        )
        if not ours:
            raise ValueError(f"{name} is not a layer of replace_moe, but {type(layer).__name__}")
        if hasattr(layer.experts, "base_layer"):
            raise ValueError(f"{name} has adapters of peft: call merge_and_unload() first")
        if with_lora:
            continue
        if isinstance(layer.experts, LoRAExperts):
            raise ValueError(f"{name} has LoRA: call training.merge_lora(model) first")
        bias = layer.gate.load_bias
        if bias is not None and bias.any() and not _parts_of(layer).bias:
            raise ValueError(
                f"{name} chooses experts by a load bias, which the original router cannot hold: "
                "drop the bias with layer.gate.load_bias.zero_()"
            )
        if lost := _lost_options(layer):
            first = next(iter(lost))
            raise ValueError(
                f"{name} has {', '.join(f'{key}={value}' for key, value in lost.items())}, which "
                f"the original block cannot hold: layer.config = dataclasses.replace(layer.config, "
                f"{first}={getattr(MoEConfig, first)!r}) drops it"
            )
    return layers


def _lost_options(layer: MoELayer) -> dict[str, object]:
    """Return the options in force in evaluation that the block does not have."""
    own = _parts_of(layer).routing
    values = {name: getattr(layer.config, name) for name in _IN_EVALUATION}
    return {k: value for k, value in values.items() if value != own.get(k, getattr(MoEConfig, k))}


def check_restorable(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if training would end in layers that the blocks cannot hold."""
    for name, layer in layers_of(unwrap(model), blocks).items():
        if layer.config.moves_load_bias and not _parts_of(layer).bias:
            raise ValueError(
                f"{name} has load_bias={layer.config.load_bias!r}, which the original router "
                "cannot hold: leave out blocks= or load_bias="
            )


def _parts_of(layer: MoELayer) -> Description:
    return layer.gate.description if isinstance(layer.gate, KeptRouter) else Description()


def experts_of(block: nn.Module) -> nn.Module:
    """Return the module with the experts' matrices: the block's, or the block itself."""
    inside = getattr(block, "experts", None)
    return inside if isinstance(inside, nn.Module) else block


def _kept(layer: MoELayer, parts: Description) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's own modules in a layer by their names in the block."""
    for path in (parts.router, parts.shared, parts.shared_gate):
        if path:
            yield path, layer.get_submodule(_path_in_layer(path, parts))


def _path_in_layer(path: str, parts: Description) -> str:
    places = {parts.router: "gate.wg", parts.shared: "shared_expert.expert"}
    return places.get(path, "shared_expert.gate")


def _join_experts(state: dict[str, Tensor], prefix: str, into: Projections) -> None:
    """Move a layer's experts from a state dict into the matrices of transformers' experts."""
    for end, view in into.views().items():
        for expert, part in enumerate(view):
            part.copy_(state.pop(f"{prefix}experts.{expert}.{end}"))
