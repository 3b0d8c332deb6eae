"""Find the MoE layers of a model, wrapped or not."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..backends._torch_private import inside_compiled
from ..distributed import process_world
from .layer import MoELayer


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inside := inside_compiled(model)) is not None:
            model = inside
        else:
            return model


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return the MoE layers of a model by name ("" for the model itself), in module order.

    Raise ValueError for a layer that was built for another number of ranks.
    """
    modules = unwrap(model).named_modules()
    layers = {name: module for name, module in modules if isinstance(module, MoELayer)}
    _, world_size = process_world()
    for layer in layers.values():
        if layer.groups.world_size != world_size and not layer.groups.simulated:
            raise ValueError(
                f"an MoELayer was built for {layer.groups.world_size} ranks, and there are "
                f"{world_size}: build the model after torch.distributed.init_process_group"
            )
    return layers
