"""Models with experts in ``torch.distributed.checkpoint``."""

import copy
from collections import defaultdict
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
from .sharded_optimizer import own_optimizer_state
from .transforms import drop_held_experts, spread_slices


class DistributedState:
    """A model and its optimizers for ``torch.distributed.checkpoint`` (``dcp``).

    Any number of ranks, in any placement, loads files of any other. Experts have their global
    numbers and their own optimizer state, as in :func:`~.full_state.full_state_dict`, so
    ``dcp_to_torch_save`` makes one file of them. Slices of an expert are DTensors over the ranks
    that hold it. Nothing is copied. ``dcp.async_save`` writes in the background.

    >>> import tempfile, torch
    >>> import torch.distributed.checkpoint as dcp
    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=4)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> state = {"run": DistributedState(layer, optimizer)}
    >>> folder = tempfile.mkdtemp()
    >>> _ = dcp.save(state, checkpoint_id=folder)
    >>> dcp.load(state, checkpoint_id=folder)

    Args:
        model (nn.Module): the model, wrapped or not. All its MoE layers have the same number of
            experts.
        optimizer (torch.optim.Optimizer or list): one or several optimizers over its parameters
            (default None: weights only).
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers | None = None):
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return ``model`` and, with an optimizer, ``last_optimizer_state``; dcp calls it.

        An optimizer that has not stepped is left as it is; its part of the result is zeros.
        """
        groups = placement_of(self._model)
        state = state_of_rank(self._model, self._optimizer, fresh=_fresh_state)
        for transform in (drop_held_experts, spread_slices):
            state = transform(state, groups, "torch.distributed.checkpoint")
        state = _rename(state, lambda number: groups.local_experts[number])
        if self._optimizer is not None:  # without parameters that are frozen or another rank steps
            named = state[OPTIMIZER][NAMED_STATE]
            state[OPTIMIZER][NAMED_STATE] = {name: each for name, each in named.items() if each}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the tensors that dcp read into the result of :meth:`state_dict`; dcp calls it."""
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
            for optimizer in optimizers:
                _forget_fresh_state(optimizer)


def _rename(state: Mapping[str, Any], number_of: Callable[[int], int]) -> dict[str, Any]:
    """Return a state with other numbers for its experts."""

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


def _fresh_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]] | None:
    """Zeros in the form of the state that a first step makes; None if any rank has made that step.

    ``torch.distributed.checkpoint`` loads into the tensors of :meth:`DistributedState.state_dict`,
    so an optimizer that has not stepped needs some. Copies of the parameters, one at a time, make a
    step by zero gradients in a copy of the optimizer: parameters, counters, hooks and schedulers do
    not notice. A parameter without gradients or with another owner has the state {}. Collective.
    """
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    trained = [param for param, _ in params if param.requires_grad]
    if not trained or any_rank(bool(optimizer.state), trained[0].device):
        return None
    every = {"state": dict.fromkeys(range(len(params)))}
    own = own_optimizer_state(optimizer, every)["state"]
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # unwrap a host's optimizer, whose step would be a real one
    trial = copy.copy(optimizer)  # without hooks
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler's, which counts
            vars(trial).setdefault(name, value)
    fresh: dict[int, dict[str, Any]] = {}
    for number, (param, group) in enumerate(params):
        fresh[number] = {}
        if param.requires_grad and number in own:
            trial.state = defaultdict(dict)
            twin = nn.Parameter(torch.zeros_like(param))
            vars(twin).update(vars(param))
            twin.grad = torch.zeros_like(param)
            trial.param_groups = [{**group, "params": [twin]}]
            trial.step()
            fresh[number] = {key: _zero(value) for key, value in trial.state[twin].items()}
    return fresh


def _zero(value: Any) -> Any:
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    return type(value)(0) if isinstance(value, bool | int | float) else value


def _forget_fresh_state(optimizer: torch.optim.Optimizer) -> None:
    """Remove state that is zero throughout, as :func:`_fresh_state` makes it.

    A first step then makes its own, which for some optimizers does not start from zeros (Rprop's
    step sizes, the momentum of SGD with dampening).
    """
    for param, state in list(optimizer.state.items()):
        parts = (local_part(value) for value in state.values())
        if not any(value.any() if torch.is_tensor(value) else value for value in parts):
            del optimizer.state[param]
