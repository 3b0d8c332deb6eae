"""Choice of the experts of a new set: new expert n is a copy of old expert ``choice[n]``.

Experts, their optimizer state and the router's rows are copied bit for bit. Everything else stays.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..layout import CheckpointError, split_key
from ..reader import SetReader
from ..state import map_state, null_experts

Load = dict[str, list[float]]  # layer (``decoder.layers.1.moe_layer.``) -> load of each expert
Choice = Mapping[str, Sequence[int]]  # layer -> old number of each new expert

# a router's parameters that all experts share; other tensors with a row per output go by expert
_COMMON = ("proj.weight", "proj.bias", "log_scale")


def copies(load: Sequence[float], num_experts: int) -> list[int]:
    """Return the choice for more experts: each new one copies the expert with most load per copy.

    Copies follow their original, so that each rank gets an even share of old and new experts.
    """
    counts = [1] * len(load)
    for _ in range(num_experts - len(load)):
        busiest = max(range(len(load)), key=lambda e: (load[e] / counts[e], -counts[e], -e))
        counts[busiest] += 1
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def most_loaded(load: Sequence[float], num_experts: int) -> list[int]:
    """Return the numbers of the most loaded experts, ascending; of equals the lower ones."""
    return sorted(sorted(range(len(load)), key=lambda e: (-load[e], e))[:num_experts])


def repeated(chosen: Sequence[int]) -> list[int]:
    """Return the numbers of the new experts that repeat the expert before them."""
    return [n for n in range(1, len(chosen)) if chosen[n] == chosen[n - 1]]


def layer_of(name: str) -> str:
    """Return ``X.moe_layer.`` of ``X.moe_layer.experts.0.Y`` or ``X.moe_layer.shared_expert.Y``."""
    parsed = split_key(name)
    return parsed[0].removesuffix("experts.") if parsed else name.partition("shared_expert.")[0]


def layers_of(source: SetReader) -> list[str]:
    """Return the MoE layers of a set."""
    return list(dict.fromkeys(map(layer_of, source.experts(range(1), with_optimizer=False)[0])))


def even_load(source: SetReader) -> Load:
    """Return the same load for every expert."""
    return {layer: [1.0] * source.num_experts for layer in layers_of(source)}


def read_load(source: SetReader, file: str | None) -> Load:
    """Return the load from the last line with all layers of ``file`` or of the log beside."""
    path = file or os.path.join(source.cset.directory, "expert_load.jsonl")
    try:
        with open(path, encoding="utf-8") as log:
            lines = [json.loads(line) for line in log if line.endswith("\n")]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file, but the load of the experts is needed; train with "
            "--moe-load-log-interval N, or name the expert_load.jsonl of the run with --load"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    names = {layer: _names_in_log(layer) for layer in layers_of(source)}
    for line in reversed(lines):
        logged = line.get("layers") if isinstance(line, dict) else None
        found = {
            layer: logged[name]
            for layer, known in names.items()
            for name in known
            if isinstance(logged, dict) and _is_load(logged.get(name), source.num_experts)
        }
        if found.keys() == names.keys():
            return found
    raise CheckpointError(
        f"{path}: no line has the load of {source.num_experts} experts in each of the layers "
        f"{', '.join(sorted({name for known in names.values() for name in known}))}"
    )


def _is_load(value: Any, num_experts: int) -> bool:
    """Return whether an entry of the log is a load of each of so many experts."""
    if not isinstance(value, list) or len(value) != num_experts:
        return False
    return all(isinstance(each, int | float) and 0 <= each < math.inf for each in value)


def _names_in_log(layer: str) -> list[str]:
    """Return the names that a layer may have in the log: ``1`` or ``decoder.1``."""
    found = re.search(r"(\w+)\.layers\.(\d+)\.", layer)
    return [found[2], f"{found[1]}.{found[2]}"] if found else [layer]


class Selection:
    """Shared state and experts of the new set, for :func:`..store.write_set`."""

    def __init__(self, source: SetReader, choice: Choice):
        self.source, self.choice = source, choice
        self.num_experts = len(next(iter(choice.values())))
        self.num_nulls = null_experts(source.shared)

    def shared_state(self) -> dict[str, Any]:
        """Return everything but the experts; routers have the rows of the new experts."""
        old = self.source.num_experts

        def choose(name: str, _: str | None, value: Any) -> Any:
            layer = self.router_of(name, value, old)
            if layer is None:
                return value
            return value[[*self.choice[layer], *range(old, len(value))]]  # null experts stay

        return map_state(self.source.shared_state(), choose)

    def experts(self, wanted: range) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return tensors and optimizer state of new experts, renumbered from 0."""
        found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        needed = {chosen[n] for chosen in self.choice.values() for n in wanted}
        for old in sorted(needed):  # in the order of the files: one is open at a time
            for part, entries in zip(found, self.source.experts(range(old, old + 1)), strict=True):
                for name, value in entries.items():
                    prefix, _, rest = split_key(name)
                    chosen = self.choice[layer_of(name)]
                    for new in (n for n in wanted if chosen[n] == old):
                        part[f"{prefix}{new - wanted.start}{rest}"] = _copied(value)
        return found

    def router_of(self, name: str, value: Any, num_experts: int) -> str | None:
        """Return the layer of a router's tensor with a row per output; None for other tensors."""
        layer = next((each for each in self.choice if name.startswith(f"{each}gate.")), None)
        if layer is None or name.removeprefix(f"{layer}gate.") in _COMMON:
            return None
        rows = len(value) if isinstance(value, Tensor) and value.dim() else None
        return layer if rows == num_experts + self.num_nulls else None


def _copied(value: Any) -> Any:
    """Copy tensors: a file stores tensors that share memory once, as tied weights."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
