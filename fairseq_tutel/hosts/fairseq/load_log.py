"""``--moe-load-log-interval``: load and utilisation of the experts over updates, as lines of JSON.

A line has the pairs that were routed to each expert (``layers``), the rows that each rank received
(``ranks``), and the :class:`~fairseq_tutel.moe.Utilisation` of their sums over the updates since
the line before. The sums since the last line are part of a checkpoint, and a run that resumes
drops the lines of later updates, which it makes again: the file is that of a run that was never
interrupted.

With ``--tensorboard-logdir`` each line is also drawn there, under ``expert_load``: for every MoE
layer a histogram of the experts' loads relative to their mean (1 is perfect balance), the largest
of them, the number of experts that no token chose, and the utilisation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from fairseq.logging import progress_bar

from ...moe import RoutingCounts, Utilisation, utilisation
from . import json_lines


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
        self._sum: dict[str, torch.Tensor] = {}

    def add(self, update: int, passes: RoutingCounts) -> None:
        """Count the forward passes of one update, of all ranks: [U, L, ...]."""
        if self._interval <= 0:
            return
        counts = {name: each.sum(0).to(torch.int64) for name, each in passes._asdict().items()}
        for name, before in self._sum.items():
            if before.shape == counts[name].shape:  # ranks of another number may have begun it
                counts[name] += before.to(counts[name].device)
        self._sum = counts if update % self._interval else {}
        if not self._sum and self._writes:
            self._write(update, RoutingCounts(**{k: each.cpu() for k, each in counts.items()}))

    def _write(self, update: int, counts: RoutingCounts) -> None:
        names = list(map(str, self._layers))
        used = {
            name: dict(zip(Utilisation._fields, (round(x, 2) for x in values), strict=True))
            for name, values in zip(
                names, torch.stack(utilisation(counts), 1).tolist(), strict=True
            )
        }
        line = {
            "update": update,
            "layers": dict(zip(names, counts.load.tolist(), strict=True)),
            "ranks": dict(zip(names, counts.received.tolist(), strict=True)),
            "utilisation": used,
        }
        json_lines.append(self._path, line)
        if self._board is not None:
            self._board.draw(update, self._layers, counts.load.float(), used)

    def state(self) -> dict[str, list] | None:
        """The sums since the last line, for a checkpoint."""
        return {name: each.tolist() for name, each in self._sum.items()} or None

    def resume(self, state: dict | list | None, update: int, *, rewrite: bool = True) -> None:
        """Go on from a checkpoint that was saved after ``update``.

        Args:
            state: of :meth:`state`; that of older checkpoints, a list, is not used.
            rewrite: whether to drop lines, and not only add some; the file may be another run's.
        """
        known = state if isinstance(state, dict) else {}
        self._sum = {name: torch.tensor(each) for name, each in known.items()}
        if self._interval and self._writes and rewrite:
            json_lines.drop_after(self._path, update)


class _Board:
    """Loads in TensorBoard, written by what fairseq writes its own scalars with."""

    def __init__(self, folder: str):
        # None without tensorboard and tensorboardX; fairseq warns of that
        make = progress_bar.SummaryWriter
        self._writer = None if make is None else make(os.path.join(folder, "expert_load"))

    def draw(
        self, update: int, layers: Sequence[int], load_LE: torch.Tensor, used: dict[str, dict]
    ) -> None:
        if self._writer is None:
            return
        for layer, load_E in zip(layers, load_LE, strict=True):
            relative_E = load_E / load_E.mean().clamp(min=1e-9)
            name = f"layer_{layer}"
            self._writer.add_histogram(f"{name}/load_over_mean", relative_E.numpy(), update)
            self._writer.add_scalar(f"{name}/largest_load_over_mean", relative_E.max(), update)
            self._writer.add_scalar(f"{name}/unused_experts", (load_E == 0).sum(), update)
            for kind, value in used[str(layer)].items():
                self._writer.add_scalar(f"{name}/utilisation_{kind}", value, update)
        self._writer.flush()
