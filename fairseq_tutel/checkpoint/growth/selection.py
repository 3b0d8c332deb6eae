"""A set whose experts are chosen from another set: new expert n is old expert ``choice[n]``.

Experts are copied to the bit with their optimizer state. So are the router's rows. Everything else
stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import select_experts, split_key
from ..reader import SetReader
from ..state import MODEL, NAMED_STATE, OPTIMIZER, null_experts

# layer (``decoder.layers.1.moe_layer.``) -> old number of each new expert
Choice = Mapping[str, Sequence[int]]

# parameters of a router that all experts share; any other tensor with a row per output goes by
# expert
_COMMON = ("proj.weight", "proj.bias", "log_scale")


def copies(load: Sequence[float], num_experts: int) -> list[int]:
    """Choose more experts: each further one copies the expert with the largest load per copy.

    With an even load every expert is copied once before any is copied twice. Copies stand behind
    their original, so that ranks, which hold neighbours, keep an even share of old and new experts.
    """
    counts = [1] * len(load)
    for _ in range(num_experts - len(load)):
        busiest = max(range(len(load)), key=lambda e: (load[e] / counts[e], -counts[e], -e))
        counts[busiest] += 1
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def most_loaded(load: Sequence[float], num_experts: int) -> list[int]:
    """Choose the experts with the largest load, in their order; the first ones of equals."""
    return sorted(sorted(range(len(load)), key=lambda e: (-load[e], e))[:num_experts])


def repeated(chosen: Sequence[int]) -> list[int]:
    """Return the numbers of the new experts that repeat the expert before them."""
    return [n for n in range(1, len(chosen)) if chosen[n] == chosen[n - 1]]


def layers_of(source: SetReader) -> list[str]:
    """Return the prefixes of the names of a set's MoE layers."""
    names = source.experts(range(1), with_optimizer=False)[0]
    return list(dict.fromkeys(split_key(name)[0].removesuffix("experts.") for name in names))


class Selection:
    """Shared state and experts of the new set, for :func:`..store.write_set`.

    Args:
        source: the set to read.
        choice: old experts of each MoE layer; layers have equally many.
    """

    def __init__(self, source: SetReader, choice: Choice):
        self.source, self.choice = source, choice
        self.num_experts = len(next(iter(choice.values())))
        self.num_nulls = null_experts(source.shared)

    def shared_state(self) -> dict[str, Any]:
        """Return everything but the experts; routers have the rows of the new experts."""
        shared = self.source.shared_state()
        shared[MODEL] = {name: self._choose(name, each) for name, each in shared[MODEL].items()}
        if OPTIMIZER in shared:
            named = {
                name: {key: self._choose(name, value) for key, value in state.items()}
                for name, state in shared[OPTIMIZER][NAMED_STATE].items()
            }
            shared[OPTIMIZER] = {**shared[OPTIMIZER], NAMED_STATE: named}
        return shared

    def experts(self, wanted: range) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return tensors and optimizer state of new experts, renumbered from 0."""
        found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        needed = {chosen[n] for chosen in self.choice.values() for n in wanted}
        for old in sorted(needed):  # in the order of the files: one is open at a time
            parts = self.source.experts(range(old, old + 1))
            for layer, chosen in self.choice.items():
                for place in (n - wanted.start for n in wanted if chosen[n] == old):
                    for part, entries in zip(found, parts, strict=True):
                        mine = {name: v for name, v in entries.items() if name.startswith(layer)}
                        copied = select_experts(mine, first=place, wanted=range(place + 1))
                        part.update({name: _copied(value) for name, value in copied.items()})
        return found

    def rows(self, entries: Mapping[str, Any], layer: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the router's tensors with a row for each new expert."""
        for name, value in entries.items():
            if _goes_by_expert(name, layer) and _has_rows(value, self.num_experts + self.num_nulls):
                yield name, value

    def _choose(self, name: str, value: Any) -> Any:
        """Return the rows of the new experts if ``value`` belongs to a router and has rows."""
        old = self.source.num_experts
        layer = next((each for each in self.choice if _goes_by_expert(name, each)), None)
        if layer is None or not _has_rows(value, old + self.num_nulls):
            return value
        return value[[*self.choice[layer], *range(old, len(value))]]


def _goes_by_expert(name: str, layer: str) -> bool:
    router = f"{layer}gate."
    return name.startswith(router) and name[len(router) :] not in _COMMON


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


def _copied(value: Any) -> Any:
    """Copy tensors: a file stores tensors that share memory once, as tied weights."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
