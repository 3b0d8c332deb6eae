"""Data parallelism around a model with experts: replicas of all else, and experts of one's own."""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import broadcast_over_replicas_, copies_of
from ..moe import MoELayer
from ..moe.experts import ExpertBank
from ..moe.model import moe_layers
from .gradients import average_expert_grad
from .replicas import ReplicaCheck


def wrap_data_parallel(model: nn.Module, **options) -> DistributedDataParallel:
    """DistributedDataParallel for a model with :class:`~fairseq_tutel.moe.MoELayer` s.

    Dense parameters are broadcast and their gradients averaged, as always. Each expert lives on its
    own rank (or replicas): its gradient, which already holds what all ranks sent to it, is divided
    by the number of ranks as it arrives, so that every gradient is that of the mean of the ranks'
    losses.

    Args:
        model: on its device; frozen parameters are frozen already, on all ranks alike.
        options: of DistributedDataParallel (device_ids on GPUs, ...).

    Raises:
        ValueError: see :func:`prepare_data_parallel`.
    """
    prepare_data_parallel(model)
    return DistributedDataParallel(model, **options)


def prepare_data_parallel(model: nn.Module, *, check_replicas: bool = True) -> None:
    """What :func:`wrap_data_parallel` does, without the wrapper: for hosts that wrap by themselves.

    A DistributedDataParallel that is put around the model later leaves experts alone. Call it once
    on the very module that will be wrapped (with Lightning, the LightningModule; of a compiled
    model, what ``torch.compile`` returned), on its device. torch's ``fully_shard`` has an argument
    for it: ``fully_shard(model, ignored_params=set(expert_parameters(model)))``. Again on a model
    that was prepared: does only what is new, such as experts that are frozen no longer.

    Args:
        check_replicas: now and then compare the ranks' dense gradients as an optimizer uses them,
            and how many steps it made: a clip or an overflow check that looks at one rank alone
            lets the ranks' models drift apart, which nothing else shows. Turn it off where dense
            gradients are meant to differ (local SGD).

    Raises:
        ValueError: the model has no MoE layer, or one was built for another number of ranks, as
            before ``torch.distributed.init_process_group``. During training, from the model's
            forward pass: the check found a difference.
    """
    layers = moe_layers(model).values()
    for layer in layers:
        for module in layer.experts.modules():
            if isinstance(module, ExpertBank):
                module.mark()  # a copied module has lost its marks
        _equal_replicas(layer)
        for param in layer.experts.parameters():
            # a frozen one takes no hook
            if param.requires_grad and not getattr(param, "averages_grad", False):
                copies = copies_of(param, layer.groups)
                param.register_hook(
                    functools.partial(average_expert_grad, groups=layer.groups, copies=copies)
                )
                param.averages_grad = True
    leave_experts_out(model)
    # ranks that exchange tokens make their forward passes together; others need not
    if check_replicas and any(layer.groups.needs_sync for layer in layers):
        ReplicaCheck.watch(model)


def _equal_replicas(layer: MoELayer) -> None:
    """Give the ranks that hold copies of a parameter or buffer of an expert the same values.

    Slices of an expert differ between these ranks; what belongs to no slice (fc2's bias) is copied.
    """
    params = [p for p in layer.experts.parameters() if copies_of(p, layer.groups) > 1]
    buffers = [] if layer.groups.num_slices > 1 else list(layer.experts.buffers())
    broadcast_over_replicas_([*params, *buffers], layer.groups)


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of this rank's experts, in all layers."""
    return [param for layer in moe_layers(model).values() for param in layer.experts.parameters()]


def leave_experts_out(model: nn.Module) -> None:
    """Make a DistributedDataParallel around the model ignore experts, in its broadcasts too."""
    names = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for path, module in model.named_modules():
        if isinstance(module, MoELayer):
            experts = (*module.experts.named_parameters(), *module.experts.named_buffers())
            prefix = f"{path}.experts." if path else "experts."
            names += [prefix + name for name, _ in experts]
    names += [f"_orig_mod.{name}" for name in names]  # the names that torch.compile gives them
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, list(dict.fromkeys(names))
    )
