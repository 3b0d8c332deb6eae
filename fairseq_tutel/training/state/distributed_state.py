"""Models with experts in ``torch.distributed.checkpoint``: on any number of ranks, in the
background, and in files that its tools read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...checkpoint import split_key
from ...checkpoint.state import MODEL, NAMED_STATE, OPTIMIZER
from ...distributed import any_rank, local_part
from ...moe.model import unwrap
from .optimizer_state import Optimizers, StateNames, as_list, load_named_state
from .save_load import load_weights, placement_of, placements_by_prefix, state_of_rank
from .transforms import drop_held_experts, spread_slices


class DistributedState:
    """A model and its optimizers, as ``torch.distributed.checkpoint`` (``dcp``) takes them.

    ::

        dcp.async_save({"run": training.DistributedState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"run": training.DistributedState(model, optimizer)}, checkpoint_id=folder)

    Names are those of :func:`~.full_state.full_state_dict`, experts by their global number, each
    with its optimizer state, so that any number of ranks reads what any number wrote, and
    ``dcp_to_torch_save`` makes one file of it. Slices of an expert are DTensors over the ranks that
    hold it, as dense parameters are that ``fully_shard`` has spread. Nothing is copied.

    Args:
        model: wrapped or not; all its MoE layers have one number of experts.
        optimizer: as :func:`~.save_load.save_checkpoint` takes it; None: weights alone.

    Raises:
        ValueError: as of :func:`~.save_load.save_checkpoint` and ``load_checkpoint``.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers | None = None):
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """``model`` and, with an optimizer, ``last_optimizer_state``; dcp calls it."""
        for optimizer in as_list(self._optimizer or []):
            _make_state(optimizer)
        groups = placement_of(self._model)
        state = state_of_rank(self._model, self._optimizer)
        for transform in (drop_held_experts, spread_slices, _without_empty_states):
            state = transform(state, groups, "torch.distributed.checkpoint")
        return _rename(state, lambda number: groups.local_experts[number])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was loaded into :meth:`state_dict`; dcp calls it."""
        first = placement_of(self._model).local_experts.start
        state = _rename(state, lambda number: number - first)
        model = unwrap(self._model)
        prefixes = tuple(placements_by_prefix(model))
        weights = {
            name: local_part(value) if name.startswith(prefixes) else value
            for name, value in state[MODEL].items()
        }
        load_weights(model, weights, "torch.distributed.checkpoint")
        if self._optimizer is not None:
            stored = state[OPTIMIZER]
            optimizers = as_list(self._optimizer)
            names = [n for each in optimizers for n in StateNames.of_optimizer(each, model)]
            named: dict[str, Any] = {name: {} for name in names}
            for name, values in stored[NAMED_STATE].items():
                if name.startswith(prefixes):
                    values = {key: local_part(value) for key, value in values.items()}
                named[name] = values
            load_named_state(self._optimizer, model, {**stored, NAMED_STATE: named})


def _rename(state: Mapping[str, Any], number_of: Callable[[int], int]) -> dict[str, Any]:
    """A state whose experts have other numbers."""

    def renamed(entries: Mapping[str, Any]) -> dict[str, Any]:
        changed = {}
        for key, value in entries.items():
            prefix, number, rest = split_key(key) or ("", 0, "")
            changed[f"{prefix}{number_of(number)}{rest}" if prefix else key] = value
        return changed

    changed = {**state, MODEL: renamed(state[MODEL])}
    if OPTIMIZER in state:
        named = renamed(state[OPTIMIZER][NAMED_STATE])
        changed[OPTIMIZER] = {**state[OPTIMIZER], NAMED_STATE: named}
    return changed


def _without_empty_states(state, groups, what):
    """Those of parameters that are frozen, or another rank's of a sharded optimizer."""
    if OPTIMIZER not in state:
        return state
    named = {name: values for name, values in state[OPTIMIZER][NAMED_STATE].items() if values}
    return {**state, OPTIMIZER: {**state[OPTIMIZER], NAMED_STATE: named}}


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Entries for what a checkpoint holds, which torch's optimizers make in their first step.

    It is a step by nothing: gradients of zero, learning rates of zero. Of a sharded optimizer some
    ranks may have no state, and steps are collective.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not params or any_rank(bool(optimizer.state), params[0].device):
        return
    grads = [None if param.grad is None else param.grad.clone() for param in params]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for param in params:
            param.grad = torch.zeros_like(param)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if torch.is_tensor(rate) else 0.0
        optimizer.step()
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
