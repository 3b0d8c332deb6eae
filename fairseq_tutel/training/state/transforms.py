"""Steps from a rank's state to the state in files; each gathers one kind of spread tensors.

Files have neither slices nor shards, so any placement on any number of ranks loads them. All ranks
call all transforms, in the order of the list. Loading needs no other rank: banks of experts and
:class:`~.optimizer_state.StateNames` take their slice of a whole, memory-mapped expert.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ... import distributed
from ...checkpoint import CheckpointError, split_key
from ...checkpoint.state import MODEL, NAMED_STATE, OPTIMIZER, map_state
from . import all_ranks

State = Mapping[str, Any]
# (state as save_state() takes it, placement of the experts, name of the operation for errors) ->
# state. Only rank 0's dense entries and the experts of ranks with slice 0 are written.
SaveTransform = Callable[[State, distributed.ExpertParallelGroups, str], State]


def drop_held_experts(state: State, groups: distributed.ExpertParallelGroups, what: str) -> State:
    """Drop the marks of the experts that a rank's state dict holds; files have metadata."""
    return {**state, MODEL: distributed.without_held_experts(state[MODEL])}


def gather_sharded(state: State, groups: distributed.ExpertParallelGroups, what: str) -> State:
    """Gather the tensors that ``fully_shard`` has sharded on rank 0's CPU. Collective."""
    rank, _ = distributed.process_world()

    def whole(name: str, key: str | None, value: Any) -> Any:
        if not (torch.is_tensor(value) and distributed.is_sharded(value)):
            return value
        full = distributed.full_tensor(value)  # collective
        return full.cpu() if rank == 0 else value

    return map_state(state, whole)


def join_slices(state: State, groups: distributed.ExpertParallelGroups, what: str) -> State:
    """Join the slices of experts on the CPU of the ranks with slice 0. Collective.

    Other ranks get their state back. Before any transfer all ranks raise CheckpointError if state
    mixes the hidden units of an expert, or if ranks of one expert differ in their common values.
    """
    if groups.num_slices == 1:
        return state
    gathers: list[distributed.SliceGather] = []

    def prepare() -> str:
        entries = list(_expert_entries(state))
        cut = {path: value for path, value, is_cut in entries if is_cut}
        gathers.append(distributed.SliceGather(cut, groups))
        return json.dumps(_signature(entries))

    signatures = [json.loads(text) for text in all_ranks().run_on_all_ranks(what, prepare)]
    _refuse_differences(signatures, groups, what)
    wholes = gathers[0].run()
    if wholes is None:
        return state
    return map_state(state, lambda name, key, value: wholes.get(_path(name, key), value))


def spread_slices(state: State, groups: distributed.ExpertParallelGroups, what: str) -> State:
    """Turn slices into DTensors over the ranks of their expert, without gathering them.

    Raises CheckpointError for state that mixes the hidden units of an expert.
    """
    if groups.num_slices == 1:
        return state
    cut = {
        path: distributed.slice_as_dtensor(value, path, groups)
        for path, value, is_cut in _expert_entries(state)
        if is_cut
    }
    return map_state(state, lambda name, key, value: cut.get(_path(name, key), value))


SAVE_TRANSFORMS: tuple[SaveTransform, ...] = (drop_held_experts, gather_sharded, join_slices)


def _path(name: str, key: str | None) -> str:
    """Return a unique key that ends in the parameter's name, as SliceGather needs it."""
    return name if key is None else f"{key}:{name}"


def _expert_entries(state: State) -> Iterator[tuple[str, Any, bool]]:
    """Yield (path, value, is_cut) of sliced parameters and of their optimizer state, in order."""
    cut = {
        name: param
        for name, param in state[MODEL].items()
        if split_key(name) is not None and distributed.slice_dim(name) is not None
    }
    for name, param in cut.items():
        yield name, param, True
    named = (state.get(OPTIMIZER) or {}).get(NAMED_STATE, {})
    for name, param in cut.items():
        for key, value in named.get(name, {}).items():
            is_tensor = torch.is_tensor(value)
            # the statistics' scale has the shape of the parameter where a slice has a single unit
            is_cut = is_tensor and value.shape == param.shape and not key.endswith("_scale")
            is_number = (
                value.numel() == 1 if is_tensor else not isinstance(value, dict | list | tuple)
            )
            if not is_cut and not is_number:
                raise CheckpointError(
                    f"the optimizer's {key} of {name} mixes the hidden units of an expert, which "
                    "are spread over ranks: use placement='replicated', or Adam or SGD"
                )
            yield _path(name, key), value, is_cut


def _signature(entries: list[tuple[str, Any, bool]]) -> list[str]:
    """Return two hashes: one must agree on all ranks, one on the ranks of an expert."""
    forms, numbers = [], []
    for path, value, is_cut in entries:
        if torch.is_tensor(value):
            forms.append(f"{path} {list(value.shape)} {value.dtype}")
        if not is_cut:
            numbers.append(f"{path} {value.tolist() if torch.is_tensor(value) else value!r}")
    return [hashlib.sha256("\n".join(texts).encode()).hexdigest() for texts in (forms, numbers)]


def _refuse_differences(signatures, groups: distributed.ExpertParallelGroups, what: str) -> None:
    if len({forms for forms, _ in signatures}) > 1:
        raise CheckpointError(
            f"{what}: the ranks differ in the names, shapes or dtypes of what they hold of experts"
        )
    for expert in range(groups.ep_size):
        holders = range(expert, len(signatures), groups.ep_size)
        if len({signatures[rank][1] for rank in holders}) > 1:
            raise CheckpointError(
                f"{what}: ranks {list(holders)} have slices of one expert, but differ in its "
                "optimizer's step or scales: they did not make the same updates"
            )
