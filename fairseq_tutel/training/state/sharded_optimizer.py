"""Optimizer state of dense parameters on one rank each: ZeRO, stage 1 (arXiv 1910.02054).

    shard_optimizer(optimizer)          once, after it is built
    optimizer.step()                    steps what this rank owns, and its experts; then the owners
                                        broadcast their parameters. Collective
    whole_optimizer_state(optimizer, optimizer.state_dict())    before a save, on all ranks
    own_optimizer_state(optimizer, state_dict)                  before ``load_state_dict``

Every dense parameter is owned as a whole (the largest first, each by the rank that owns least), so
that an optimizer that treats each parameter by itself makes the very numbers that it makes
unsharded, statistics in fp16 with a scale per parameter too. Gradients stay averaged on all ranks,
and norms, clipping, loss scales and accumulation as they are. It is hooks of the optimizer, no
wrapper: a parameter of another rank has no gradient while the optimizer steps, which every
optimizer of torch takes for "not this one", so that it makes no state for it.

Files know nothing of it: rank 0 has the whole state when a set is written, on its CPU, and loading
takes from a whole state what a rank owns.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ...checkpoint import CheckpointError
from ...distributed import (
    as_bytes,
    broadcast_from_owners_,
    is_expert,
    is_sharded,
    process_world,
    send_to_first,
    share_out,
)
from . import all_ranks

_ATTRIBUTE = "optimizer_shards"
_Entry = tuple[int, str, Any]  # number of a parameter, key of its state, value
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Keep the state of every dense parameter on one rank only. Steps become collective.

    Args:
        optimizer: of torch, without state; it treats each parameter by itself (not LAMB with its
            norm over all, nor one that needs gradients of all parameters). Its parameters are the
            same on all ranks but for experts, which each rank keeps stepping itself.

    Raises:
        ValueError: the optimizer has state already.
    """
    if getattr(optimizer, _ATTRIBUTE, None) is None and process_world()[1] > 1:
        setattr(optimizer, _ATTRIBUTE, _Shards(optimizer))


def whole_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], what: str
) -> dict[str, Any]:
    """The state dict with the state of all dense parameters on rank 0, in memory of the CPU where
    it is another rank's; unchanged on other ranks, and of an optimizer that is not sharded.

    Collective. Raises CheckpointError on all ranks where state cannot be sent, or rank 0 has no
    memory for it; ``what`` is done, for the error.
    """
    shards = getattr(optimizer, _ATTRIBUTE, None)
    return state_dict if shards is None else shards.gather(state_dict, what)


def own_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """A whole state dict without what other ranks own."""
    shards = getattr(optimizer, _ATTRIBUTE, None)
    return state_dict if shards is None else shards.take(state_dict)


class _Shards:
    """Who owns which parameter of an optimizer, and its hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        if optimizer.state:
            raise ValueError("an optimizer is sharded before it has state: before steps or loading")
        self._rank, world_size = process_world()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # a matrix of an expert belongs to the expert
        own = [is_expert(getattr(p, "stack", p)) or is_sharded(p) for p in params]
        dense = [i for i, is_own in enumerate(own) if not is_own]
        owners = share_out([params[i].numel() for i in dense], world_size)
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
        broadcast_from_owners_(self._owned)

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
        texts = ranks.run_on_all_ranks(what, lambda: json.dumps([_form(*each) for each in held]))
        forms = [json.loads(text) for text in texts]
        others: dict[int, list[_Entry]] = {}

        def make_room() -> None:
            others.update((owner, [_empty(*form) for form in forms[owner]]) for owner in owners)

        owners = range(1, len(forms))
        ranks.run_on_first(what, make_room)  # now, as nobody may fail while others send
        for owner in owners:
            entries = held if owner == self._rank else others.get(owner, [])
            tensors = [value.contiguous() for _, _, value in entries if torch.is_tensor(value)]
            sizes = [size for *_, size in forms[owner] if size is not None]
            send_to_first(owner, sizes, [as_bytes(tensor) for tensor in tensors])
            for index, key, value in others.get(owner, ()):
                states[index] = {**states.get(index, {}), key: value}
        return {**state_dict, "state": states}


def _form(index: int, key: str, value: Any) -> list:
    """What :func:`_empty` needs, for json, and bytes to be sent, None where there are none."""
    if torch.is_tensor(value):
        return [index, key, list(value.shape), str(value.dtype), value.nbytes]
    if value is None or isinstance(value, bool | int | float | str):
        return [index, key, value, None, None]
    raise CheckpointError(
        f"the optimizer keeps a {type(value).__name__} as {key}, which is neither a tensor nor a "
        "number and cannot be sent to the rank that saves: train it without sharding"
    )


def _empty(index: int, key: str, value: Any, dtype: str | None, size: int | None) -> _Entry:
    if dtype is None:
        return index, key, value
    return index, key, torch.empty(value, dtype=_DTYPES[dtype])
