"""Log files of a run beside its checkpoints: one JSON object per line, with its update.

``expert_load.jsonl`` has ``layers`` (pairs per expert), ``ranks`` (rows that each received) and
``utilisation``, by layer. A run that resumes drops the lines of later updates, which it
makes again: the files equal those of a run that was never interrupted.
"""

import logging
import os
from collections.abc import Sequence

import torch
from fairseq.logging import metrics

from ....moe import RoutingCounts, Utilisation, utilisation
from ....tuning import ExchangeTuner, describe_key, describe_tuning
from ..json_lines import append_line, drop_after, replace_file

logger = logging.getLogger(__name__)


class ExpertLoadLog:
    """The file ``expert_load.jsonl`` of one run: a line every ``interval`` updates, 0: none."""

    def __init__(self, folder: str, layers: Sequence[int], interval: int, writes: bool):
        self._path = os.path.join(folder, "expert_load.jsonl")
        self._layers, self._interval, self._writes = list(map(str, layers)), interval, writes
        self._sum: dict[str, torch.Tensor] = {}

    def add(self, update: int, passes: RoutingCounts) -> None:
        """Count the forward passes of one update, of all ranks: [U, L, ...]."""
        if self._interval <= 0:
            return
        counts = {name: each.sum(0).to(torch.int64) for name, each in passes._asdict().items()}
        for name, before in self._sum.items():
            if before.shape == counts[name].shape:  # else another number of ranks began the sum
                counts[name] += before.to(counts[name].device)
        self._sum = counts if update % self._interval else {}
        if not self._sum and self._writes:
            self._write(update, RoutingCounts(**{k: each.cpu() for k, each in counts.items()}))

    def _write(self, update: int, counts: RoutingCounts) -> None:
        parts = {"layers": counts.load.tolist(), "ranks": counts.received.tolist()}
        rows = ([round(x, 2) for x in row] for row in torch.stack(utilisation(counts), 1).tolist())
        parts["utilisation"] = [dict(zip(Utilisation._fields, row, strict=True)) for row in rows]
        line = {name: dict(zip(self._layers, part, strict=True)) for name, part in parts.items()}
        append_line(self._path, {"update": update, **line})

    def state(self) -> dict[str, list] | None:
        """Return the sums since the last line, for a checkpoint."""
        return {name: each.tolist() for name, each in self._sum.items()} or None

    def resume(self, state: dict | list | None, update: int, *, rewrite: bool = True) -> None:
        """Go on from a checkpoint; ``rewrite``: drop lines of later updates than this one."""
        known = state if isinstance(state, dict) else {}  # older checkpoints have a list
        self._sum = {name: torch.tensor(each) for name, each in known.items()}
        if self._interval and self._writes and rewrite:
            drop_after(self._path, update)


class ExchangeLog:
    """Log lines and files of the tuner of one run, if there is one."""

    def __init__(self, tuner: ExchangeTuner | None, folder: str, writes: bool):
        self._tuner, self._writes = tuner, writes
        self._lines = os.path.join(folder, "exchange.jsonl")
        self._file = os.path.join(folder, "exchange.json")

    def after(self, update: int) -> None:
        """Write what happened up to an update."""
        if self._tuner is None:
            return
        for event in self._tuner.take_events():
            if not self._writes:
                continue
            if event["what"] == "decision":
                logger.info(describe_tuning(event))
            about = describe_key(event["key"])
            append_line(self._lines, {"update": update, **event, "about": about})
        if self._tuner.milliseconds is not None:
            metrics.log_scalar("moe_exchange_ms", self._tuner.milliseconds, weight=1, round=3)

    def state(self) -> dict | None:
        """Return the state of the tuner, for a checkpoint."""
        return None if self._tuner is None else self._tuner.state()

    def resume(self, state: dict | None, update: int, *, rewrite: bool = True) -> None:
        """Go on from a checkpoint; see :meth:`ExpertLoadLog.resume`."""
        if self._tuner is None:
            return
        self._tuner.resume(state)
        if self._writes and rewrite:
            drop_after(self._lines, update)

    def save(self) -> None:
        """Write the file that a run can be pinned to."""
        if self._tuner is None or self._tuner.is_pinned or not self._writes:
            return
        replace_file(self._file, [self._tuner.file(), "\n"])
