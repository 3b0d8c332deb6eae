"""Data parallelism for models with experts: dense parameters are replicated, experts are not."""

import functools

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import (
    broadcast_over_replicas_,
    copies_of,
    gather_texts,
    note_reduction,
    refuse_differences,
)
from ..moe import MoELayer
from ..moe.experts import ExpertBank
from ..moe.model import moe_layers, unwrap
from .gradients import average_expert_grad
from .replicas import ReplicaCheck


def wrap_data_parallel(model: nn.Module, **options) -> DistributedDataParallel:
    """Wrap a model in a DistributedDataParallel that leaves experts alone. Collective.

    Every gradient is the gradient of the mean of the ranks' losses. Dense parameters are broadcast
    from rank 0 and their gradients averaged. An expert's gradient already holds the sum over all
    ranks that sent it tokens, so it is divided by the number of ranks as it arrives.

    Args:
        model (nn.Module): the model on its device, with or without MoE layers. Freeze parameters
            before, equally on all ranks.
        **options: arguments of DistributedDataParallel, such as ``device_ids`` (default: torch's).

    Raises:
        ValueError: as :func:`prepare_data_parallel`, or no dense parameter is trained.
    """
    prepare_data_parallel(model)
    experts = set(expert_parameters(model))
    if not any(param.requires_grad for param in set(model.parameters()) - experts):
        raise ValueError(
            "no dense parameter is trained: call prepare_data_parallel(model), and do not wrap it"
        )
    return DistributedDataParallel(model, **options)


def prepare_data_parallel(model: nn.Module, *, check_replicas: bool = True) -> None:
    """Prepare a model for a host that wraps it later. Collective.

    A DistributedDataParallel around the model then leaves experts alone. Call it on the module that
    the host wraps: the LightningModule, or the module that ``torch.compile`` returned. torch's
    ``fully_shard`` also needs ``ignored_params=set(expert_parameters(model))``. Call it again
    after you unfreeze experts or replace a layer. Ranks that hold the same expert start with the
    values of the first of them.

    Args:
        model (nn.Module): the model on its device, with or without MoE layers.
        check_replicas (bool): compare the ranks' dense gradients and numbers of steps now and then
            (default True). A clip or overflow check of one rank alone makes the ranks' models
            drift apart without an error. Turn it off if dense gradients may differ (local SGD).

    Raises:
        ValueError: a layer was built for another number of ranks. During training, the model's
            forward pass raises it if the ranks' dense gradients differ.
    """
    layers = moe_layers(model).values()
    _refuse_wrong_parameters(model)
    for layer in layers:
        for module in layer.experts.modules():
            if isinstance(module, ExpertBank):
                module.mark()  # to_empty() replaces parameters, without their marks
        # slices differ between ranks; what belongs to no slice (fc2's bias) is copied
        copied = [p for p in layer.experts.parameters() if copies_of(p, layer.groups) > 1]
        buffers = [] if layer.groups.num_slices > 1 else list(layer.experts.buffers())
        broadcast_over_replicas_([*copied, *buffers], layer.groups)
        for param in layer.experts.parameters():
            # a frozen one takes no hook
            if param.requires_grad and not getattr(param, "averages_grad", False):
                copies = copies_of(param, layer.groups)
                param.register_hook(
                    functools.partial(average_expert_grad, groups=layer.groups, copies=copies)
                )
                vars(param)["averages_grad"] = True
                note_reduction(param)
    leave_experts_out(model)
    # ranks that exchange tokens make their forward passes together; others need not
    if check_replicas and any(layer.groups.needs_sync for layer in layers):
        ReplicaCheck.watch(model)


def _refuse_wrong_parameters(model: nn.Module) -> None:
    """Raise ValueError for dense parameters in experts, and for replicas of experts that differ."""
    layers = moe_layers(model)
    prefixes = tuple(f"{name}.experts.".lstrip(".") for name in layers)
    named = list(unwrap(model).named_parameters(remove_duplicate=False))
    dense = {param: name for name, param in named if not name.startswith(prefixes)}
    spread = any(layer.groups.needs_sync for layer in layers.values())
    for name, param in named if spread else ():
        if name.startswith(prefixes) and param in dense:
            raise ValueError(
                f"{dense[param]} is also {name}: the model has one such parameter on each rank, "
                "and experts are on one rank each; give the experts a parameter of their own"
            )
    for prefix, layer in zip(prefixes, layers.values(), strict=True):
        if layer.groups.communicates and hasattr(layer.experts, "base_layer"):
            raise ValueError(
                f"{prefix.rstrip('.')} has adapters of peft (target_parameters), which have no "
                "global numbers: on several ranks call add_lora(model), and save_adapters for peft"
            )
        if layer.groups.num_replicas > 1 and not layer.groups.simulated:
            experts = layer.experts.named_parameters()
            trained = [name for name, param in experts if param.requires_grad]
            texts = gather_texts(" ".join(trained) or "none")
            what = f"the trained parameters of {prefix.rstrip('.')}"
            for first in range(layer.groups.ep_size):
                if len(set(texts[first :: layer.groups.ep_size])) > 1:
                    refuse_differences(what, texts)


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of this rank's experts in all layers; not collective.

    Args:
        model (nn.Module): the model, wrapped or not. Without MoE layers the list is empty.
    """
    return [param for layer in moe_layers(model).values() for param in layer.experts.parameters()]


def leave_experts_out(model: nn.Module) -> None:
    """Make a later DistributedDataParallel ignore experts; not collective.

    Args:
        model (nn.Module): the module that will be wrapped, by a host without
            :func:`prepare_data_parallel`.
    """
    names = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for path, module in model.named_modules():
        if isinstance(module, MoELayer):
            experts = (*module.experts.named_parameters(), *module.experts.named_buffers())
            names += [f"{path}.experts.{name}".lstrip(".") for name, _ in experts]
    names += [f"_orig_mod.{name}" for name in names]  # the names that torch.compile gives them
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, list(dict.fromkeys(names))
    )
