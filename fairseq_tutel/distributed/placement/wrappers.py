"""Refuse data parallelism that does not fit experts, and models that nobody prepared for it."""

import functools
import weakref
from typing import NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...backends._torch_private import active_ddp, first_parameter, fully_sharded
from .expert_params import is_expert
from .groups import ExpertParallelGroups

# layers whose experts are spread over ranks, and optimizers whose model is prepared
_spread: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def expect_reduction(layer: torch.nn.Module, groups: ExpertParallelGroups) -> None:
    """Refuse optimizer steps of a layer on ranks until :func:`note_reduction` of its experts."""
    if groups.needs_sync:
        _hook_steps()
        _spread.add(layer)


def note_reduction(param: torch.nn.Parameter) -> None:
    """Note that somebody averages the gradients of this parameter of an expert over ranks."""
    vars(param)["is_reduced"] = True


@functools.cache
def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_unprepared)


def _refuse_unprepared(optimizer, args, kwargs) -> None:
    """Raise ValueError at an optimizer's first step if its model was never prepared."""
    if optimizer in _checked:
        return
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if all(param.grad is None for param in params):
        return  # a closure computes gradients later
    for layer in _spread:
        trained = [p for p in layer.get_submodule("experts").parameters() if p.requires_grad]
        is_ready = all(getattr(param, "is_reduced", False) for param in trained)
        if not is_ready and not params.isdisjoint(layer.parameters()):
            raise ValueError(
                "this model has experts on several ranks and is not prepared for training, so "
                "each rank would train other dense weights: call net = "
                "fairseq_tutel.training.wrap_data_parallel(model) before training, or "
                "prepare_data_parallel(model) if another program wraps the model, or "
                "reduce_expert_grads after the backward pass if it averages gradients itself"
            )
    _checked.add(optimizer)


def refuse_plain_wrapper(
    experts: torch.nn.Module, groups: ExpertParallelGroups, checked: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """Raise ValueError in a forward pass if a wrapper has the experts among its parameters.

    DistributedDataParallel would overwrite the ranks' different experts with rank 0's and average
    their gradients. ``fully_shard`` is refused in one process, too, because the program is meant
    for several. Return the wrapper and parameter that were checked, for the next pass. A parameter
    of ``fully_shard`` may have the id of a checked one that it replaced: its mark is read always.
    """
    mine = first_parameter(experts)
    active = active_ddp()
    found = (checked[0] if active is None else id(active), id(mine))
    if mine is None:
        return found
    if found != checked and active is not None and groups.needs_sync:
        for name, param in active.module.named_parameters():
            if param is mine and name not in active.parameters_to_ignore:
                _refuse("DistributedDataParallel", name)
    if is_expert(mine):  # fully_shard replaces the parameters that it shards by unmarked ones
        return found
    for root in fully_sharded():
        for name, param in root.named_parameters():
            if param is mine:
                how = ", and give fully_shard ignored_params=set(expert_parameters(model))"
                _refuse("fully_shard", name, how)
    return found


def _refuse(wrapper: str, name: str, how: str = "") -> NoReturn:
    raise ValueError(
        f"{wrapper} would make the experts of all ranks one ({name} is among its parameters): use "
        "fairseq_tutel.training.wrap_data_parallel(model), or call prepare_data_parallel(model) on "
        f"the module before it is wrapped{how}"
    )
