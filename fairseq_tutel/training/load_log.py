"""``--moe-load-log-interval``: the load of every expert, summed over updates, as lines of JSON.

The sum since the last line is part of a checkpoint, and a run that resumes drops the lines of
later updates, which it makes again: the file is that of a run that was never interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch


class ExpertLoadLog:
    """The file ``expert_load.jsonl`` of one run.

    Args:
        folder: the save dir.
        layers: numbers of the MoE layers.
        interval: updates per line; 0: no file.
        writes: whether this rank writes (all of them count).
    """

    def __init__(self, folder: str, layers: Sequence[int], interval: int, writes: bool):
        self._path = os.path.join(folder, "expert_load.jsonl")
        self._layers, self._interval, self._writes = layers, interval, writes
        self._sum: torch.Tensor | None = None

    def add(self, update: int, load_LE: torch.Tensor) -> None:
        """Count the tokens that chose each expert of each layer in one update, of all ranks."""
        load_LE = load_LE.to(torch.int64)
        total = load_LE if self._sum is None else self._sum.to(load_LE.device) + load_LE
        self._sum = total if update % self._interval else None
        if self._sum is None and self._writes:
            layers = dict(zip(map(str, self._layers), total.tolist(), strict=True))
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update, "layers": layers}) + "\n")

    def state(self) -> list[list[int]] | None:
        """The sum since the last line, for a checkpoint."""
        return None if self._sum is None else self._sum.tolist()

    def resume(self, state: list[list[int]] | None, update: int, *, rewrite: bool = True) -> None:
        """Go on from a checkpoint that was saved after ``update``.

        Args:
            rewrite: whether to drop lines, and not only add some; the file may be another run's.
        """
        self._sum = None if state is None else torch.tensor(state)
        if not (self._interval and self._writes and rewrite) or not os.path.exists(self._path):
            return
        with open(self._path, encoding="utf-8") as file:
            lines = file.readlines()
        kept = [line for line in lines if _update_of(line) <= update]
        if len(kept) < len(lines):
            with open(f"{self._path}.tmp", "w", encoding="utf-8") as file:
                file.writelines(kept)
            os.replace(f"{self._path}.tmp", self._path)


def _update_of(line: str) -> float:
    """Infinity for a line that was cut short by a crash."""
    try:
        return json.loads(line)["update"]
    except (ValueError, KeyError):
        return float("inf")
