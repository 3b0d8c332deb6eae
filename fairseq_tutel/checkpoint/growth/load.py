"""Load of the experts in training, from the log ``expert_load.jsonl`` of the run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from ..layout import CheckpointError

Load = dict[str, list[float]]  # layer (``decoder.layers.1.moe_layer.``) -> load of each expert


def read_load(checkpoint: str, file: str | None, num_experts: int, layers: Sequence[str]) -> Load:
    """Read the last line of the log that has the load of ``num_experts`` experts in all layers.

    Args:
        checkpoint: X.pt; the log is beside it unless ``file`` names another one.
        file: the log.
        num_experts: E.
        layers: prefixes of the layers' names.

    Raises:
        CheckpointError: the log or such a line is missing.
    """
    path = file or os.path.join(os.path.dirname(checkpoint), "expert_load.jsonl")
    try:
        with open(path, encoding="utf-8") as log:
            lines = [json.loads(line) for line in log if line.endswith("\n")]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file, but the load of the experts is needed; train with "
            "--moe-load-log-interval N, or name the expert_load.jsonl of the run with --load"
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
        f"{path}: no line has the load of {num_experts} experts in each of the layers "
        f"{', '.join(sorted({name for known in names.values() for name in known}))}"
    )


def even_load(num_experts: int, layers: Sequence[str]) -> Load:
    """Return the same load for every expert."""
    return {layer: [1.0] * num_experts for layer in layers}


def _names_in_log(layer: str) -> list[str]:
    """Return the names that a layer may have in the log: ``1`` or ``decoder.1``."""
    found = re.search(r"(\w+)\.layers\.(\d+)\.", layer)
    return [found[2], f"{found[1]}.{found[2]}"] if found else [layer]
