"""What the tuner of a run does, as log lines and files.

``exchange.jsonl`` has a line for each trial and decision, with the update before which it ended and
its times in microseconds; ``exchange.json``, written with every checkpoint, is what
``--moe-tune-file`` reads.
"""

from __future__ import annotations

import logging
import os

from fairseq.logging import metrics

from .. import ExchangeTuner, describe_tuning
from . import json_lines

logger = logging.getLogger(__name__)


class ExchangeLog:
    """The tuner of one run, and what is written of it.

    Args:
        tuner: None: nothing is tuned, and nothing is written.
        folder: the save dir.
        writes: whether this rank writes.
    """

    def __init__(self, tuner: ExchangeTuner | None, folder: str, writes: bool):
        self._tuner, self._writes = tuner, writes
        self._lines = os.path.join(folder, "exchange.jsonl")
        self._file = os.path.join(folder, "exchange.json")

    def after(self, update: int) -> None:
        """Write down what happened up to an update."""
        if self._tuner is None:
            return
        for event in self._tuner.take_events():
            if not self._writes:
                continue
            if event.what in ("decision", "drift"):
                logger.info(describe_tuning(event))
            line = {"update": update, "what": event.what, "key": str(event.key)}
            line["choice"] = event.choice
            if event.samples:
                line["samples"] = list(event.samples)
            if event.time:
                line.update(us=event.time, baseline_us=event.baseline, trials=event.trials)
            json_lines.append(self._lines, line)
        if self._tuner.milliseconds is not None:
            metrics.log_scalar("moe_exchange_ms", self._tuner.milliseconds, weight=1, round=3)

    def state(self) -> dict | None:
        """For a checkpoint."""
        return None if self._tuner is None else self._tuner.state()

    def resume(self, state: dict | None, update: int, *, rewrite: bool = True) -> None:
        """Go on from a checkpoint that was saved after ``update``.

        Args:
            state: of :meth:`state`.
            rewrite: whether to drop lines of later updates; the file may be another run's.
        """
        if self._tuner is None:
            return
        self._tuner.resume(state)
        if self._writes and rewrite:
            json_lines.drop_after(self._lines, update)

    def save(self) -> None:
        """Write the file that a run can be pinned to."""
        if self._tuner is None or self._tuner.is_pinned or not self._writes:
            return
        with open(f"{self._file}.tmp", "w", encoding="utf-8") as file:
            file.write(self._tuner.file() + "\n")
        os.replace(f"{self._file}.tmp", self._file)
