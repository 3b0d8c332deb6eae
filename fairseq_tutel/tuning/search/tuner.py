"""A state machine that tries choices while training goes on and keeps the fastest one.

In each step every rank calls ``payload`` (its integers, which are gathered), ``record`` (those of
all ranks) and ``begin`` (the choice of the step). All ranks therefore decide the same. Choices by
capacity come from Tutel (Hwang et al., arXiv 2206.03382, section 3.3).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .search import Choice, Search, Space, median

WINDOW = 128  # capacities of a bucket
# Steps whose samples are awaited: a GPU is rarely further behind the host.
SLOTS = 4
MISSING = -1
# A trial ends early if its first samples are so many times slower than the best.
_ABORT_RATIOS = (1.5, 1.2)
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


class StepChoice(NamedTuple):
    """Choice of one step."""

    step: int  # its number
    choice: dict[str, Any]  # by the names of the axes
    measured: bool  # a sample is wanted


@dataclass
class Entry:
    """State of one key."""

    choice: Choice  # decided; before that, the start of the search
    search: Search | None  # None if the key is decided
    time: int = 0
    baseline: int = 0
    trials: int = 0
    opened: int = 0  # step at which the search began
    # of the current trial
    samples: list[int] = field(default_factory=list)
    num_steps: int = 0
    trial: int = 0  # its number, which tells late samples apart

    @property
    def current(self) -> Choice:
        """Best choice so far."""
        return self.choice if self.search is None else self.search.best


class Tuner:
    """Choices of one run, by key; ``steps`` and ``max_loss`` are those of an ExchangeTuner.

    ``start`` has the values where a search begins if no other key of its kind has a choice (default
    None: the simplest).
    """

    def __init__(
        self,
        space: Space,
        *,
        steps: int = 5,
        max_loss: float = 0.02,
        start: Mapping[str, Any] | None = None,
    ):
        self.space = space
        self.steps, self.max_loss = steps, max_loss
        self._start = space.simplest if start is None else space.choice(start)
        self.entries: dict[Key, Entry] = {}
        self.step = 0  # number of the next step
        self.run_time = self.lost_time = 0  # microseconds of the run, and of it lost by trials
        self.last_sample: int | None = None  # microseconds
        # (step, key, trial) whose sample some rank lacks
        self._awaited: list[tuple[int, Key, int]] = []
        self._events: list[dict[str, Any]] = []
        self._checksum = 0  # of all decisions; the same on all ranks

    @property
    def awaited(self) -> list[int]:
        """Steps whose samples are awaited."""
        return [step for step, _, _ in self._awaited]

    def payload(self, elapsed: int, measured: Mapping[int, int]) -> list[int]:
        """Return this rank's line of the table, equally long on every rank and in every step.

        ``elapsed``: microseconds since the last step began; ``measured``: those of known samples.
        """
        samples = [measured.get(step, MISSING) for step in self.awaited]
        return [self._checksum, elapsed, *samples, *[MISSING] * (SLOTS - len(samples))]

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
        pairs = list(zip(self._awaited, slots, strict=False))
        self._awaited = [one for one, times in pairs if MISSING in times]
        for (_, key, trial), times in pairs:
            if MISSING not in times:
                self.last_sample, entry = min(times), self.entries[key]
                # otherwise the trial is over
                if entry.search is not None and trial == entry.trial:
                    self._note(key, entry, min(times))

    def begin(self, key: Key) -> StepChoice:
        """Return the choice of the next step."""
        if key not in self.entries:  # begin with the choice of the nearest decided key
            other = nearest((k for k, e in self.entries.items() if e.search is None), key)
            start = self.entries[other].choice if other else self._start
            self.entries[key] = Entry(start, Search(self.space, start), opened=self.step)
        entry = self.entries[key]
        choice, measured = self._next(key, entry)
        begun = StepChoice(self.step, self.space.values(choice), measured)
        if measured:  # the oldest one is dropped if there is no room
            self._awaited = [*self._awaited, (self.step, key, entry.trial)][-SLOTS:]
        self.step += 1
        return begun

    def take_events(self) -> list[dict[str, Any]]:
        """Return events since the last call, as lines of ``exchange.jsonl``.

        A ``trial`` has ``samples`` in microseconds; ``unfit`` is a trial that could not be
        measured; a ``decision`` has medians ``us`` of its choice and ``baseline_us`` of the start.
        """
        events, self._events = self._events, []
        return events

    def restart_checksum(self) -> None:
        """Compute the checksum from a loaded state, so that ranks compare what they have."""
        known = sorted((str(key), e.current, e.trial) for key, e in self.entries.items())
        self._checksum = zlib.crc32(repr((self.step, known)).encode())

    def _next(self, key, entry):
        """Return (choice, whether to measure it)."""
        if entry.search is None:
            return entry.choice, self.step % MEASURED_EVERY == 0
        over_budget = self.lost_time > self.max_loss * self.run_time
        if over_budget and entry.search.history and not entry.num_steps:
            return entry.current, False
        entry.num_steps += 1
        if entry.num_steps > 4 * self.steps + SLOTS and not entry.samples:
            self._end_trial(key, entry, None)  # nothing can be measured
            return self._next(key, entry)
        return entry.search.candidate, entry.num_steps > 1

    def _note(self, key, entry, microseconds):
        entry.samples.append(microseconds)
        number, best = len(entry.samples), entry.search.time(entry.search.best)
        aborted = (
            best is not None
            and number <= len(_ABORT_RATIOS)
            and min(entry.samples) > _ABORT_RATIOS[number - 1] * best
        )
        if number >= self.steps - 1 or aborted:
            self._end_trial(key, entry, entry.samples)

    def _end_trial(self, key, entry, samples):
        search, choice = entry.search, entry.search.candidate
        search.put(samples)
        if samples is None:
            self._log("unfit", key, choice)
        else:
            behind = median(samples) - search.time(search.best)
            self.lost_time += max(0, behind) * entry.num_steps
            self._log("trial", key, choice, samples=list(samples))
        entry.samples, entry.num_steps, entry.trial = [], 0, entry.trial + 1
        if search.candidate is not None:
            return
        entry.choice, entry.search = search.best, None
        entry.time = search.time(search.best) or 0
        entry.baseline = search.time(search.start) or 0
        entry.trials = sum(samples is not None for _, samples in search.history)
        found = {"us": entry.time, "baseline_us": entry.baseline, "trials": entry.trials}
        self._log("decision", key, entry.choice, **found)

    def _log(self, what, key, choice, **more):
        event = {"what": what, "key": str(key), "choice": self.space.values(choice), **more}
        self._events.append(event)
        self._checksum = zlib.crc32(repr((self.step, event)).encode(), self._checksum)
