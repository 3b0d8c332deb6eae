"""Tries choices while training goes on and keeps the fastest one; a state machine without a clock.

In each step every rank does ``payload`` (its integers, which are gathered), ``record`` (those of
all ranks) and ``begin`` (the step's choice), and so decides the same. That capacities have choices
is Tutel's (Hwang et al., arXiv 2206.03382, section 3.3).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .search import Choice, Search, Space, median

WINDOW = 128  # capacities of a bucket
# Steps whose samples are waited for: a GPU is rarely further behind the host.
SLOTS = 4
MISSING = -1
# The rest of a trial is not run where its first samples are so many times slower than the best.
_ABORT_RATIOS = (1.5, 1.2)
MEASURED_EVERY = 5  # steps after which that of a decided key is measured, for the log


class Key(NamedTuple):
    """What decides how long a choice takes; each key has a choice of its own."""

    kind: str  # phase, dtype and sizes
    bucket: int  # capacity // WINDOW

    def __str__(self) -> str:
        return f"{self.kind}/{self.bucket}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """The inverse of ``str``."""
        kind, _, bucket = text.rpartition("/")
        return cls(kind, int(bucket))


def nearest(keys: Iterable[Key], key: Key) -> Key | None:
    """The key of the same kind with the nearest capacity; None: there is none of this kind."""
    alike = [other for other in keys if other.kind == key.kind]
    return min(alike, key=lambda o: (abs(o.bucket - key.bucket), o.bucket), default=None)


class StepChoice(NamedTuple):
    """What a step does."""

    step: int  # its number
    choice: dict[str, Any]  # by the names of the axes
    measured: bool  # whether a sample of it is wanted


@dataclass
class Entry:
    """What is known of a key."""

    choice: Choice  # of the decision; before it the one that the search began with
    search: Search | None  # under way; None where the key is decided
    time: int = 0
    baseline: int = 0
    trials: int = 0
    opened: int = 0  # step at which the search began
    # of the trial that is under way; samples that come late are known by its number
    samples: list[int] = field(default_factory=list)
    num_steps: int = 0
    trial: int = 0

    @property
    def current(self) -> Choice:
        """What is best as far as is known."""
        return self.choice if self.search is None else self.search.best


class Tuner:
    """One run's choices, by key.

    The first of a trial's ``steps`` is not measured (it may connect and allocate); ``max_loss``:
    part of the run's time that trials may have cost before no further one begins; ``start``: where
    a search begins if no other key of its kind has a choice; else the simplest.
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
        self.step = 0  # number of the next one
        self.run_time = self.lost_time = 0  # microseconds of the run, and what trials cost of them
        self.last_sample: int | None = None  # microseconds
        # (step, key, trial) whose sample some rank did not have yet
        self._awaited: list[tuple[int, Key, int]] = []
        self._events: list[dict[str, Any]] = []
        self._checksum = 0  # of all decisions: the same on all ranks

    @property
    def awaited(self) -> list[int]:
        """Steps of which samples are wanted."""
        return [step for step, _, _ in self._awaited]

    def payload(self, elapsed: int, measured: Mapping[int, int]) -> list[int]:
        """This rank's line of the table; as many integers on every rank and in every step.

        ``elapsed``: microseconds since the last step began; ``measured``: those known, by step.
        """
        samples = [measured.get(step, MISSING) for step in self.awaited]
        return [self._checksum, elapsed, *samples, *[MISSING] * (SLOTS - len(samples))]

    def record(self, table: Sequence[Sequence[int]]) -> None:
        """Take note of what all ranks measured; what a rank does not have yet is waited for.

        A sample is the smallest of all ranks' times: a rank that arrives last in an exchange waits
        least, so that their skew cancels. ValueError where the ranks' states differ.
        """
        checksums, elapsed, *slots = zip(*table, strict=True)
        if len(set(checksums)) > 1:
            raise ValueError(
                "MoE ranks disagree on what the tuner found so far: do all of them read the same "
                "checkpoint and the same file of choices?"
            )
        self.run_time += min(elapsed)
        pairs = list(zip(self._awaited, slots, strict=False))
        self._awaited = [one for one, times in pairs if MISSING in times]
        for (_, key, trial), times in pairs:
            if MISSING not in times:
                self.last_sample, entry = min(times), self.entries[key]
                # else of a trial that is over
                if entry.search is not None and trial == entry.trial:
                    self._note(key, entry, min(times))

    def begin(self, key: Key) -> StepChoice:
        """What the next step does."""
        if key not in self.entries:  # it begins where the nearest one that is decided ended
            other = nearest((k for k, e in self.entries.items() if e.search is None), key)
            start = self.entries[other].choice if other else self._start
            self.entries[key] = Entry(start, Search(self.space, start), opened=self.step)
        entry = self.entries[key]
        choice, measured = self._next(key, entry)
        begun = StepChoice(self.step, self.space.values(choice), measured)
        if measured:  # the oldest one is given up where there is no room
            self._awaited = [*self._awaited, (self.step, key, entry.trial)][-SLOTS:]
        self.step += 1
        return begun

    def take_events(self) -> list[dict[str, Any]]:
        """What happened since they were last taken, as the lines of ``exchange.jsonl`` have it.

        ``what``, ``key`` and ``choice``: of a ``trial`` (``samples``, microseconds), of one that
        cannot be measured (``unfit``), or of a ``decision`` (median microseconds ``us`` of it and
        ``baseline_us`` of the start, and how many ``trials`` it took).
        """
        events, self._events = self._events, []
        return events

    def restart_checksum(self) -> None:
        """After a state was loaded: compare ranks by what they have."""
        known = sorted((str(key), e.current, e.trial) for key, e in self.entries.items())
        self._checksum = zlib.crc32(repr((self.step, known)).encode())

    def _next(self, key, entry):
        """(choice, whether to measure it)."""
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
