"""MoE layers in a plain PyTorch model on several ranks."""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import average_expert_grad, ddp_without_experts, process_world
from .layer import MoELayer


def wrap_data_parallel(model: nn.Module, **options) -> DistributedDataParallel:
    """DistributedDataParallel for a model with :class:`MoELayer` s.

    Dense parameters are broadcast and their gradients averaged, as always. Each expert lives on its
    own rank (or replicas): its gradient, which already holds what all ranks sent to it, is divided
    by the number of ranks as it arrives, so that every gradient is that of the mean of the ranks'
    losses.

    Args:
        model: on its device; frozen parameters are frozen already, on all ranks alike.
        options: of DistributedDataParallel (device_ids on GPUs, ...).

    Raises:
        ValueError: a layer was built for another number of ranks, as before
            ``torch.distributed.init_process_group``.
    """
    _, world_size = process_world()
    for module in model.modules():
        if isinstance(module, MoELayer):
            if module.groups.world_size != world_size:
                raise ValueError(
                    f"an MoELayer was built for {module.groups.world_size} ranks, and there are "
                    f"{world_size}: build the model after torch.distributed.init_process_group"
                )
            average = functools.partial(average_expert_grad, groups=module.groups)
            for param in module.experts.parameters():
                if param.requires_grad:  # a frozen one takes no hook
                    param.register_hook(average)
    return ddp_without_experts(model, **options)
