"""Experts of which each rank trains a slice are whole in files: what a save adds for that.

Files do not know of slices (:mod:`fairseq_tutel.distributed.slices`): a set that a sliced run
writes is the one that a replicated run would have written, bit for bit, with the optimizer's state
and the fp32 copies of half weights. So it is read, merged, resharded and evaluated like any other,
and resumed with any placement on any number of ranks.

Saving joins them: between ``state_dict()``, which is of this rank alone, and the writing, which it
precedes. Loading needs no other rank: modules (:class:`~fairseq_tutel.moe.Experts`) and
:class:`~.optimizer_state.StateNames` take their slice of a whole expert, which is memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..checkpoint import AllRanks, CheckpointError
from ..checkpoint.layout import split_key
from ..checkpoint.state import MODEL, NAMED_STATE, OPTIMIZER
from ..distributed import (
    ExpertParallelGroups,
    SliceGather,
    gather_texts,
    process_world,
    slice_dim,
)


class _Entry(NamedTuple):
    """A value of an expert: of a parameter, or of its optimizer's state (under ``key``)."""

    name: str
    key: str | None
    value: Any
    is_cut: bool

    @property
    def path(self) -> str:
        """Unique, with the parameter's name at its end, as SliceGather takes it."""
        return self.name if self.key is None else f"{self.key}:{self.name}"


def join_experts(
    state: Mapping[str, Any], groups: ExpertParallelGroups, what: str
) -> Mapping[str, Any]:
    """A rank's state with whole experts for its slices, on the CPU. Collective with slices.

    Args:
        state: as :func:`~.checkpoint.save_state` takes it.
        groups: placement of the experts.
        what: names the step in errors.

    Returns:
        On the ranks with slice 0, which write, a new state; on the others the given one.

    Raises:
        ValueError: on all ranks, before anything is communicated: state that mixes the hidden units
            of an expert, ranks of one expert that differ in what they should have in common, or no
            memory for a whole expert on one of them.
    """
    if groups.num_slices == 1:
        return state
    rank, world_size = process_world()
    gathers: list[SliceGather] = []

    def prepare() -> str:
        entries = list(_entries(state))
        cut = {entry.path: entry.value for entry in entries if entry.is_cut}
        gathers.append(SliceGather(cut, groups))
        return json.dumps(_signature(entries))

    signatures = AllRanks(rank, world_size, gather_texts).together(what, prepare)
    _refuse_differences([json.loads(text) for text in signatures], groups, what)
    wholes = gathers[0].run()
    return state if wholes is None else _replaced(state, wholes)


def _entries(state: Mapping[str, Any]) -> Iterator[_Entry]:
    """Of all experts of a rank, in an order that all ranks have in common."""
    model = state[MODEL]
    for name, param in model.items():
        if split_key(name) is not None and slice_dim(name) is not None:
            yield _Entry(name, None, param, True)
    named = (state.get(OPTIMIZER) or {}).get(NAMED_STATE, {})
    for name, values in named.items():
        if split_key(name) is None or slice_dim(name) is None:
            continue
        for key, value in values.items():
            is_cut = torch.is_tensor(value) and value.shape == model[name].shape
            # the statistics' scale, where a slice has a single unit
            is_cut = is_cut and not key.endswith("_scale")
            if not is_cut and not _is_number(value):
                raise CheckpointError(
                    f"the optimizer's {key} of {name} mixes the hidden units of an expert, which "
                    "are spread over ranks: use the placement replicated, or an optimizer that "
                    "treats each weight by itself, as Adam and SGD do"
                )
            yield _Entry(name, key, value, is_cut)


def _is_number(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str)


def _signature(entries: list[_Entry]) -> list[str]:
    """What all ranks must have in common, and what those of one expert must."""
    forms, numbers = [], []
    for entry in entries:
        value = entry.value
        if torch.is_tensor(value):
            forms.append(f"{entry.path} {list(value.shape)} {value.dtype}")
        if not entry.is_cut:
            number = value.tolist() if torch.is_tensor(value) else value
            numbers.append(f"{entry.path} {number!r}")
    return [hashlib.sha256("\n".join(texts).encode()).hexdigest() for texts in (forms, numbers)]


def _refuse_differences(signatures, groups: ExpertParallelGroups, what: str) -> None:
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


def _replaced(state: Mapping[str, Any], wholes: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = {name: wholes.get(name, value) for name, value in state[MODEL].items()}
    joined = {**state, MODEL: model}
    optimizer = state.get(OPTIMIZER)
    if optimizer is not None:
        named = {
            name: {
                key: wholes.get(_Entry(name, key, None, True).path, value)
                for key, value in values.items()
            }
            for name, values in optimizer[NAMED_STATE].items()
        }
        joined[OPTIMIZER] = {**optimizer, NAMED_STATE: named}
    return joined
