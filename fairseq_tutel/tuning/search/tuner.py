"""A state machine that tries choices while training goes on and keeps the fastest one.

In each step every rank calls ``payload`` (its integers, which are gathered), ``record`` (those of
all ranks) and ``begin`` (the choice of the step). All ranks therefore decide the same. Choices by
capacity come from Tutel (Hwang et al., arXiv 2206.03382, section 3.3).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .halving import Choice, Search, median, neighbours

WINDOW = 128  # capacities of a bucket
# Steps whose samples are awaited: a GPU is rarely further behind the host.
SLOTS = 4
MISSING = -1
MEASURED_EVERY = 5  # steps between measurements of a decided key, for the log


class Key(NamedTuple):
    """Sizes and kind that the time of a choice depends on; each key has its own choice."""

    kind: str  # phase, dtype and sizes
    bucket: int  # capacity // WINDOW

    def __str__(self) -> str:
        return f"{self.kind}/{self.bucket}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """Parse the text of ``str``."""
        kind, _, bucket = text.rpartition("/")
        return cls(kind, int(bucket))


def nearest(keys: Iterable[Key], key: Key) -> Key | None:
    """Return the key of the same kind with the nearest capacity; None if there is none."""
    alike = [other for other in keys if other.kind == key.kind]
    return min(alike, key=lambda o: (abs(o.bucket - key.bucket), o.bucket), default=None)


class Tuner:
    """Searches of one run, by key, among ``choices``, the simplest first.

    ``steps`` and ``max_loss`` are those of an ExchangeTuner. ``start`` is tried first if no other
    key of its kind is decided (default: the simplest).
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        *,
        steps: int = 5,
        max_loss: float = 0.02,
        start: Choice | None = None,
    ):
        self.choices, self.near = list(choices), neighbours(choices)
        self.steps, self.max_loss = steps, max_loss
        self._start = self.choices.index(start) if start in self.choices else 0
        self.searches: dict[Key, Search] = {}
        self.step = 0  # number of the next step
        self.run_time = self.lost_time = 0  # microseconds of the run, and of it lost by trials
        self.last_sample: int | None = None  # microseconds
        # steps whose sample some rank lacks, with key and samples of their trials
        self.awaited: dict[int, tuple[Key, list[int]]] = {}
        # Since they were taken, as lines of ``exchange.jsonl``: a ``trial`` has ``samples`` in
        # microseconds; ``unfit`` is a trial that could not be measured; a ``decision`` has medians
        # ``us`` of its choice and ``baseline_us`` of the start.
        self.events: list[dict[str, Any]] = []
        self.checksum = 0  # of all decisions; the same on all ranks

    def payload(self, elapsed: int, measured: Mapping[int, int]) -> list[int]:
        """Return this rank's line of the table, equally long on every rank and in every step.

        ``elapsed``: microseconds since the last step began; ``measured``: those of known samples.
        """
        samples = [measured.get(step, MISSING) for step in self.awaited]
        return [self.checksum, elapsed, *samples, *[MISSING] * (SLOTS - len(samples))]

    def record(self, table: Sequence[Sequence[int]]) -> None:
        """Take the samples of all ranks; wait for those that some rank does not have yet.

        A sample is the smallest time of all ranks: the rank that arrives last in an exchange waits
        least, so skew cancels. Raise ValueError if the states of the ranks differ.
        """
        checksums, elapsed, *slots = zip(*table, strict=True)
        if len(set(checksums)) > 1:
            raise ValueError(
                "MoE ranks disagree on what the tuner found so far: give all the same files"
            )
        self.run_time += min(elapsed)
        for step, times in zip(list(self.awaited), slots, strict=False):
            if MISSING not in times:
                key, samples = self.awaited.pop(step)
                self.last_sample, search = min(times), self.searches[key]
                if samples is search.samples:  # otherwise the trial is over
                    samples.append(self.last_sample)
                    self._note(key, search)

    def begin(self, key: Key) -> tuple[int, Choice, bool]:
        """Return number and choice of the next step, and whether a sample is wanted."""
        if key not in self.searches:  # begin with the choice of the nearest decided key
            other = nearest((k for k, search in self.searches.items() if not search.round), key)
            start = self.searches[other].choice if other else self._start
            self.searches[key] = Search(self.near, start, self.step)
        search = self.searches[key]
        choice, measured = self._next(key, search)
        if measured:
            if len(self.awaited) == SLOTS:
                del self.awaited[min(self.awaited)]
            self.awaited[self.step] = key, search.samples if search.round else []
        self.step += 1
        return self.step - 1, self.choices[choice], measured

    def _next(self, key: Key, search: Search) -> tuple[int, bool]:
        """Return (choice, whether to measure it)."""
        if not search.round:
            return search.choice, self.step % MEASURED_EVERY == 0
        over_budget = self.lost_time > self.max_loss * self.run_time
        if over_budget and search.trials and not search.num_steps:
            return search.best, False
        search.num_steps += 1
        if search.num_steps > 4 * self.steps + SLOTS and not search.samples:
            self._end_trial(key, search)  # nothing can be measured
            return self._next(key, search)
        return search.choice, search.num_steps > 1

    def _note(self, key: Key, search: Search) -> None:
        """End the trial if it has its samples, or if the choice is clearly slower than the best."""
        number, best = len(search.samples), min(search.times.values(), default=0)
        wanted = 1 if search.round == 1 else (self.steps - 1) << (search.round - 2)
        if number >= wanted or min(search.samples) > (1.5 if number == 1 else 1.2) * best:
            self._end_trial(key, search)

    def _end_trial(self, key: Key, search: Search) -> None:
        choice, samples, num_steps = search.choice, search.samples, search.num_steps
        search.end_trial()
        if samples:
            behind = median(samples) - min(search.times.values())
            self.lost_time += max(0, behind) * num_steps
            self._log("trial", key, choice, samples=samples)
        else:
            self._log("unfit", key, choice)
        if not search.round:
            self._log("decision", key, search.choice, **search.found)

    def _log(self, what: str, key: Key, choice: int, **more: Any) -> None:
        event = {"what": what, "key": str(key), "choice": dict(self.choices[choice]), **more}
        self.events.append(event)
        self.checksum = zlib.crc32(repr((self.step, event)).encode(), self.checksum)
