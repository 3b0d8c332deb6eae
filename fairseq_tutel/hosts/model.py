"""Where the experts are in a model, and where they live."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import ExpertParallelGroups, process_world
from ..moe import MoELayer


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and ``torch.compile``, whose names are its own."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The MoE layers of a model by name ("" for the model itself), in the order of its modules.

    Raises:
        ValueError: there is none, or one was built for another number of ranks, as before
            ``torch.distributed.init_process_group``.
    """
    layers = {
        name: module
        for name, module in unwrap(model).named_modules()
        if isinstance(module, MoELayer)
    }
    if not layers:
        raise ValueError(f"{type(unwrap(model)).__name__} has no MoELayer")
    _, world_size = process_world()
    for layer in layers.values():
        if layer.groups.world_size != world_size and not layer.groups.simulated:
            raise ValueError(
                f"an MoELayer was built for {layer.groups.world_size} ranks, and there are "
                f"{world_size}: build the model after torch.distributed.init_process_group"
            )
    return layers


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of this rank's experts, in all layers."""
    return [param for layer in moe_layers(model).values() for param in layer.experts.parameters()]


def expert_placement(model: nn.Module) -> ExpertParallelGroups:
    """The placement that all MoE layers of a model have in common.

    Raises:
        ValueError: the layers differ in their number of experts, or in how those are spread.
    """
    layers = moe_layers(model)
    (name, first), *others = layers.items()
    for other, layer in others:
        if layer.groups.num_experts != first.groups.num_experts:
            raise ValueError(
                "the MoE layers of a checkpoint have one number of experts, but "
                f"{name or 'the model'} has {first.groups.num_experts} and {other} has "
                f"{layer.groups.num_experts}"
            )
        if layer.groups.ep_size != first.groups.ep_size:
            raise ValueError(
                "the MoE layers of a checkpoint spread their experts alike, but those of "
                f"{name or 'the model'} are on every {first.groups.ep_size} ranks and those of "
                f"{other} on every {layer.groups.ep_size}"
            )
        if layer.groups.num_slices != first.groups.num_slices:
            raise ValueError(
                "the MoE layers of a checkpoint have one placement, but "
                f"{name or 'the model'} has experts {first.groups.placement} and {other} "
                f"{layer.groups.placement}"
            )
    return first.groups
