"""A set whose experts are made of another set's: tensors and optimizer state, by a recipe.

An expert with one part is that expert, to the bit; one of several is their weighted mean, in fp64,
rounded once. Rows of the router follow the experts, and so does its optimizer state; everything
else is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import select_experts
from ..reader import SetReader
from ..state import MODEL, NAMED_STATE, OPTIMIZER, null_experts
from .recipes import Parts, Recipe, layers_in

# of a router, what all experts have in common; anything else with a row for each of its outputs
# goes by expert
_COMMON = ("proj.weight", "proj.bias", "log_scale")
_SCALE = "_scale"


class Recombined:
    """What ``write_set`` takes, of a source and a recipe.

    Args:
        source: the set that is read.
        recipe: for each of its MoE layers.
    """

    def __init__(self, source: SetReader, recipe: Recipe):
        self.source, self.recipe = source, recipe
        self.num_experts = len(next(iter(recipe.values())))
        self._num_nulls = null_experts(source.shared)

    @property
    def num_outputs(self) -> int:
        """Of the routers: of experts and null experts."""
        return self.num_experts + self._num_nulls

    def shared_state(self) -> dict[str, Any]:
        """All but the experts, with the routers' rows of the new ones."""
        shared = self.source.shared_state()

        def change(entries: Mapping[str, Any]) -> dict[str, Any]:
            return {name: self._of_router(name, value) for name, value in entries.items()}

        shared[MODEL] = change(shared[MODEL])
        if OPTIMIZER in shared:
            named = shared[OPTIMIZER][NAMED_STATE]
            shared[OPTIMIZER] = {**shared[OPTIMIZER], NAMED_STATE: change(named)}
        return shared

    def experts(self, wanted: range) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and optimizer state of new experts, numbered from 0."""
        uses: dict[int, list[tuple[str, int, float]]] = {}
        for prefix, experts in self.recipe.items():
            for number in wanted:
                for old, weight in experts[number]:
                    uses.setdefault(old, []).append((prefix, number - wanted.start, weight))
        found: list[dict[str, list]] = [{}, {}]
        for old in sorted(uses):  # each once, in the order of the files, of which one is open
            for part, entries in zip(found, self.source.experts(range(old, old + 1)), strict=True):
                for prefix, place, weight in uses[old]:
                    mine = {name: v for name, v in entries.items() if name.startswith(prefix)}
                    mine = select_experts(mine, first=place, wanted=range(place + 1))
                    for name, value in mine.items():
                        part.setdefault(name, []).append((value, weight))
        model, named_state = (
            {name: combined(*zip(*values, strict=True)) for name, values in part.items()}
            for part in found
        )
        return model, named_state

    def rows(self, entries: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what the router of a layer has for each expert, in ``entries`` of a
        result of :meth:`shared_state`.
        """
        for name, value in entries.items():
            is_tensor = isinstance(value, Tensor) and value.dim() > 0
            if _router_part(name, prefix) and is_tensor and len(value) == self.num_outputs:
                yield name, value

    def _of_router(self, name: str, value: Any) -> Any:
        """A parameter, or its optimizer state, with rows of the new experts where it has rows."""
        prefix = next((p for p in self.recipe if _router_part(name, p)), None)
        if prefix is None:
            return value
        if isinstance(value, Mapping):
            return {key: self._rows(each, self.recipe[prefix]) for key, each in value.items()}
        return self._rows(value, self.recipe[prefix])

    def _rows(self, value: Any, experts: Sequence[Parts]) -> Any:
        old = self.source.num_experts
        is_tensor = isinstance(value, Tensor) and value.dim() > 0
        if not is_tensor or len(value) != old + self._num_nulls:
            return value
        nulls = range(old, len(value))
        rows = [
            combined([value[e] for e, _ in parts], [w for _, w in parts])
            for parts in [*experts, *(((null, 1.0),) for null in nulls)]
        ]
        return torch.stack(rows)


def _router_part(name: str, prefix: str) -> str | None:
    """The name within a layer's router of a parameter that goes by expert."""
    router = f"{prefix}gate."
    part = name[len(router) :] if name.startswith(router) else None
    return None if part in _COMMON else part


def combined(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean of tensors, numbers or states of an optimizer; of one value that value, in
    memory of its own. Of counts of steps, and what else is no floating point, the largest.
    """
    first = values[0]
    if isinstance(first, Mapping):
        if len(values) == 1:
            return {key: combined([value], weights) for key, value in first.items()}
        return _combined_state(values, weights)
    if len(values) == 1:
        return first.clone() if isinstance(first, Tensor) else first
    if isinstance(first, Tensor) and first.is_floating_point():
        return _mean(values, weights).to(first.dtype)
    if isinstance(first, float):
        return float(sum(w * v for w, v in zip(weights, values, strict=True)))
    return max(values, key=float)


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return sum(w * v.double() for w, v in zip(weights, values, strict=True))


def _combined_state(states: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict:
    """A state of several; a statistic with a scale of its own gets the largest of the scales."""
    result = {}
    for key, first in states[0].items():
        values = [state[key] for state in states]
        if key.endswith(_SCALE) and key.removesuffix(_SCALE) in states[0]:
            result[key] = max(values, key=float)
        elif f"{key}{_SCALE}" in states[0]:
            scales = [float(state[f"{key}{_SCALE}"]) for state in states]
            largest = max(scales) or 1.0
            parts = [s / largest * w for s, w in zip(scales, weights, strict=True)]
            result[key] = _mean(values, parts).to(first.dtype)
        elif key == "step":
            result[key] = max(values, key=float)
        else:
            result[key] = combined(values, weights)
    return result


def layers_of(source: SetReader) -> list[str]:
    """The MoE layers of a set."""
    return layers_in(source.experts(range(1), with_optimizer=False)[0])
