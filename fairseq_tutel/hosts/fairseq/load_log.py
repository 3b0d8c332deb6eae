"""``--moe-load-log-interval``: the load of every expert, summed over updates, as lines of JSON.

The sum since the last line is part of a checkpoint, and a run that resumes drops the lines of
later updates, which it makes again: the file is that of a run that was never interrupted.

With ``--tensorboard-logdir`` each line is also drawn there, under ``expert_load``: for every MoE
layer a histogram of the experts' loads relative to their mean (1 is perfect balance), the largest
of them, and the number of experts that no token chose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch
from fairseq.logging import progress_bar


class ExpertLoadLog:
    """The file ``expert_load.jsonl`` of one run.

    Args:
        folder: the save dir.
        layers: numbers of the MoE layers.
        interval: updates per line; 0: no file.
        writes: whether this rank writes (all of them count).
        tensorboard: fairseq's ``--tensorboard-logdir``, None without it.
    """

    def __init__(
        self,
        folder: str,
        layers: Sequence[int],
        interval: int,
        writes: bool,
        tensorboard: str | None = None,
    ):
        self._path = os.path.join(folder, "expert_load.jsonl")
        self._board = _Board(tensorboard) if tensorboard and writes and interval > 0 else None
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
            if self._board is not None:
                self._board.draw(update, self._layers, total.float().cpu())

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


class _Board:
    """Loads in TensorBoard, written by what fairseq writes its own scalars with."""

    def __init__(self, folder: str):
        # None without tensorboard and tensorboardX; fairseq warns of that
        make = progress_bar.SummaryWriter
        self._writer = None if make is None else make(os.path.join(folder, "expert_load"))

    def draw(self, update: int, layers: Sequence[int], load_LE: torch.Tensor) -> None:
        if self._writer is None:
            return
        for layer, load_E in zip(layers, load_LE, strict=True):
            relative_E = load_E / load_E.mean().clamp(min=1e-9)
            name = f"layer_{layer}"
            self._writer.add_histogram(f"{name}/load_over_mean", relative_E.numpy(), update)
            self._writer.add_scalar(f"{name}/largest_load_over_mean", relative_E.max(), update)
            self._writer.add_scalar(f"{name}/unused_experts", (load_E == 0).sum(), update)
        self._writer.flush()


def _update_of(line: str) -> float:
    """Infinity for a line that was cut short by a crash."""
    try:
        return json.loads(line)["update"]
    except (ValueError, KeyError):
        return float("inf")
