"""ZeRO, stage 1 (arXiv 1910.02054): each dense parameter's optimizer state is on one rank.

Each dense parameter has one owner (the largest first, each to the rank that owns least). A step
updates this rank's parameters and experts; then the owners broadcast. So an optimizer that steps
each parameter by itself computes the same bits as without sharding, also with fp16 statistics.
Gradients stay averaged on all ranks; norms, clipping, loss scales and accumulation do not change.
Hooks of the optimizer do it: parameters of other ranks have no gradient during the step, so torch's
optimizers skip them and make no state for them.

Files do not change: rank 0 gathers the whole state on its CPU when a set is written, and loading
keeps this rank's part of the whole state.
"""

import json
from typing import Any

import torch

from ... import distributed
from ...checkpoint import CheckpointError
from . import all_ranks

_ATTRIBUTE = "optimizer_shards"
_Entry = tuple[int, str, Any]  # number of a parameter, key of its state, value
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Keep each dense parameter's optimizer state on one rank only (ZeRO-1); not collective.

    Steps become collective, and results stay bit-identical. Each rank steps its own experts as
    before. In one process nothing changes.

    Args:
        optimizer (torch.optim.Optimizer): an optimizer without state that steps each parameter by
            itself, as SGD and Adam do (LAMB with a norm over all parameters does not). Its dense
            parameters are the same on all ranks.
    """
    if getattr(optimizer, _ATTRIBUTE, None) is None and distributed.process_world()[1] > 1:
        setattr(optimizer, _ATTRIBUTE, _Shards(optimizer))


def whole_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], what: str
) -> dict[str, Any]:
    """Gather a sharded optimizer's state of all dense parameters on rank 0's CPU. Collective.

    Args:
        optimizer (torch.optim.Optimizer): an optimizer, sharded or not.
        state_dict (dict): its ``state_dict()``.
        what (str): names the operation in errors, such as ``"saving last.pt"``.

    Returns:
        dict: the whole state dict on rank 0; ``state_dict`` on other ranks, and if the optimizer
        is not sharded. All ranks raise CheckpointError if state cannot be sent or received.
    """
    shards = getattr(optimizer, _ATTRIBUTE, None)
    return state_dict if shards is None else shards.gather(state_dict, what)


def own_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return a whole state dict without the parts that other ranks own; not collective.

    Args:
        optimizer (torch.optim.Optimizer): an optimizer, sharded or not.
        state_dict (dict): result of :func:`whole_optimizer_state`.
    """
    shards = getattr(optimizer, _ATTRIBUTE, None)
    return state_dict if shards is None else shards.take(state_dict)


class _Shards:
    """Owners of an optimizer's parameters, and the hooks of its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        if optimizer.state:
            raise ValueError("an optimizer is sharded before it has state: before steps or loading")
        self._rank, world_size = distributed.process_world()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # a matrix of an expert belongs to the expert
        own = [
            distributed.is_expert(getattr(p, "stack", p)) or distributed.is_sharded(p)
            for p in params
        ]
        dense = [i for i, is_own in enumerate(own) if not is_own]
        owners = distributed.share_out([params[i].numel() for i in dense], world_size)
        # by their numbers in state dicts
        self._owners = dict(zip(dense, owners, strict=True))
        self._owned: dict[int, list[torch.Tensor]] = {}
        for index, owner in self._owners.items():
            self._owned.setdefault(owner, []).append(params[index])
        self._set_aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer, args, kwargs) -> None:
        others = [p for owner, ps in self._owned.items() if owner != self._rank for p in ps]
        self._set_aside = [(param, param.grad) for param in others]
        for param in others:
            param.grad = None

    def _after_step(self, optimizer, args, kwargs) -> None:
        for param, grad in self._set_aside:
            param.grad = grad
        self._set_aside = []
        distributed.broadcast_from_owners_(self._owned)

    def take(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See :func:`own_optimizer_state`."""
        mine = {
            index: state
            for index, state in state_dict["state"].items()
            if self._owners.get(index, self._rank) == self._rank
        }
        return {**state_dict, "state": mine}

    def gather(self, state_dict: dict[str, Any], what: str) -> dict[str, Any]:
        """See :func:`whole_optimizer_state`."""
        states = dict(state_dict["state"])
        mine = [i for i, owner in self._owners.items() if owner == self._rank and i in states]
        held = [(i, key, value) for i in mine for key, value in states[i].items()]
        ranks = all_ranks()
        # nobody may fail while others send: say what is sent, then make room for it on rank 0
        texts = ranks.run_on_all_ranks(what, lambda: json.dumps([_form(*each) for each in held]))
        forms = [json.loads(text) for text in texts]
        owners = range(1, len(forms))
        others: dict[int, list[_Entry]] = {}

        def make_room() -> None:
            others.update((owner, [_empty(*form) for form in forms[owner]]) for owner in owners)

        ranks.run_on_first(what, make_room)
        for owner in owners:
            entries = held if owner == self._rank else others.get(owner, [])
            tensors = [value.contiguous() for _, _, value in entries if torch.is_tensor(value)]
            sizes = [size for *_, size in forms[owner] if size is not None]
            distributed.send_to_first(
                owner, sizes, [distributed.as_bytes(tensor) for tensor in tensors]
            )
            for index, key, value in others.get(owner, ()):
                states[index] = {**states.get(index, {}), key: value}
        return {**state_dict, "state": states}


def _form(index: int, key: str, value: Any) -> list:
    """Return the arguments of :func:`_empty` for json; the last is the bytes to send, or None."""
    if torch.is_tensor(value):
        return [index, key, list(value.shape), str(value.dtype), value.nbytes]
    if value is None or isinstance(value, bool | int | float | str):
        return [index, key, value, None, None]
    kept = f"a {type(value).__name__} as {key}, which is neither a tensor nor a number"
    raise CheckpointError(f"the optimizer keeps {kept}: train it without sharding")


def _empty(index: int, key: str, value: Any, dtype: str | None, size: int | None) -> _Entry:
    if dtype is None:
        return index, key, value
    return index, key, torch.empty(value, dtype=_DTYPES[dtype])
