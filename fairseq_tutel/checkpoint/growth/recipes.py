"""Of which experts a new one is made: decided from their load and the rows of their router.

A recipe has, for each MoE layer by the beginning of its names (``decoder.layers.1.moe_layer.``),
the new experts in their order: for each the old experts that it is made of, with weights that sum
to one. A copy has one part.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..layout import CheckpointError, split_key

Parts = tuple[tuple[int, float], ...]
Recipe = dict[str, list[Parts]]


def copies(load: Sequence[float], num_experts: int) -> list[Parts]:
    """More experts: each further one is a copy of that with the largest load per copy so far.

    With an even load everyone gets a copy before anyone gets two. Copies follow their original, so
    that the ranks, which hold neighbours, keep an even share of old and new ones.
    """
    counts = [1] * len(load)
    for _ in range(num_experts - len(load)):
        busiest = max(range(len(load)), key=lambda e: (load[e] / counts[e], -counts[e], -e))
        counts[busiest] += 1
    return [((e, 1.0),) for e, count in enumerate(counts) for _ in range(count)]


def is_copy(experts: Sequence[Parts]) -> list[bool]:
    """Which of the new experts repeat an earlier one."""
    seen: set[Parts] = set()
    return [parts in seen or seen.add(parts) is not None for parts in experts]


def most_loaded(load: Sequence[float], num_experts: int) -> list[Parts]:
    """Fewer experts: those with the largest load, in their order; of equals the first."""
    kept = sorted(range(len(load)), key=lambda e: (-load[e], e))[:num_experts]
    return [((e, 1.0),) for e in sorted(kept)]


def merged_pairs(load: Sequence[float], rows: Tensor, num_experts: int) -> list[Parts]:
    """Fewer experts: the two whose router rows [E, M] have the largest cosine become one, with
    weights in proportion to their load, and so on.
    """
    groups = [[e] for e in range(len(load))]
    loads, rows = [max(float(each), 0.0) for each in load], list(rows.double())
    while len(groups) > num_experts:
        units = torch.stack([row / row.norm().clamp(min=1e-300) for row in rows])
        cosine = (units @ units.t()).masked_fill(torch.ones(len(rows), len(rows)).tril() > 0, -2)
        first, second = divmod(int(cosine.argmax()), len(groups))
        total = loads[first] + loads[second]
        share = loads[first] / total if total else 0.5
        rows[first] = share * rows[first] + (1 - share) * rows.pop(second)
        groups[first] += groups.pop(second)
        loads[first] += loads.pop(second)
    return [weighted(sorted(group), load) for group in groups]


def weighted(experts: Sequence[int], load: Sequence[float]) -> Parts:
    """One expert of several, with weights in proportion to their load."""
    total = sum(load[e] for e in experts)
    if not total:
        return tuple((e, 1 / len(experts)) for e in experts)
    return tuple((e, load[e] / total) for e in experts)


def read_load(path: str, num_experts: int, layers: Sequence[str]) -> dict[str, list[float]]:
    """The experts' load in each of the layers, of the last line of ``expert_load.jsonl`` with that
    number of experts.

    Raises:
        CheckpointError: there is no such file or line, or it lacks a layer.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file, and the experts' load is needed; train with "
            "--moe-load-log-interval N, or name the run's expert_load.jsonl by --load"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    names = {layer: _names_in_log(layer) for layer in layers}
    for line in reversed(lines):
        by_layer = line.get("layers", {}) if isinstance(line, dict) else {}
        found = {
            layer: by_layer[name]
            for layer, known in names.items()
            for name in known
            if len(by_layer.get(name, ())) == num_experts
        }
        if set(found) == set(layers):
            return found
    raise CheckpointError(
        f"{path}: has no line with the load of {num_experts} experts in each of the layers "
        f"{', '.join(sorted({name for known in names.values() for name in known}))}"
    )


def load_file_beside(path: str) -> str:
    """Where a run with checkpoints of this name logs the load."""
    return os.path.join(os.path.dirname(path), "expert_load.jsonl")


def even_load(num_experts: int, layers: Sequence[str]) -> dict[str, list[float]]:
    """Where no load is known."""
    return {layer: [1.0] * num_experts for layer in layers}


def _names_in_log(layer: str) -> list[str]:
    """Names that a layer may have in the log: ``1`` or ``decoder.1``."""
    found = re.search(r"(\w+)\.layers\.(\d+)\.", layer)
    return [found[2], f"{found[1]}.{found[2]}"] if found else [layer]


def layers_in(entries: Mapping[str, object]) -> list[str]:
    """Beginnings of the names of the MoE layers, out of the names of experts."""
    prefixes = (parsed[0] for name in entries if (parsed := split_key(name)))
    return list(dict.fromkeys(prefix.removesuffix("experts.") for prefix in prefixes))
