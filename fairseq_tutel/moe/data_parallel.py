"""MoE layers in a plain PyTorch model on several ranks."""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import average_expert_grad, ddp_without_experts
from .layer import MoELayer


def wrap_data_parallel(model: nn.Module, **options) -> DistributedDataParallel:
    """DistributedDataParallel for a model with :class:`MoELayer` s.

    Dense parameters are broadcast and their gradients averaged, as always. Each expert lives on its
    own rank (or replicas): its gradient, which already holds what all ranks sent to it, is divided
    by the number of ranks as it arrives, so that every gradient is that of the mean of the ranks'
    losses.

    Args:
        model: on its device; frozen parameters are frozen already, on all ranks alike.
        options: of DistributedDataParallel (device_ids, ...).
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            average = functools.partial(average_expert_grad, groups=module.groups)
            for param in module.experts.parameters():
                if param.requires_grad:  # a frozen one takes no hook
                    param.register_hook(average)
    return ddp_without_experts(model, **options)
