"""Tries choices while training goes on and keeps the fastest one; a state machine without a clock.

Every rank runs it on the same integers (of all ranks, gathered once a step), and so decides the
same: nobody leads, and no decision is sent. The dictionary from capacities to choices is that of
Tutel (Hwang et al., arXiv 2206.03382, section 3.3), whose code leaves it to the user.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .ring import SLOTS, Ring, Sample
from .search import Search, median
from .space import Choice, Space

WINDOW = 128  # capacities of a bucket
# What is left of a trial is not run where its first samples are so many times slower than the best.
_HOPELESS = (1.5, 1.2)
# Buckets from this one on are so wide (a quarter of the capacity) that the next one is much alike.
_ALIKE = 4
# A decided key is measured every so many steps; it is searched again where the median of so many
# samples (50 steps) has moved by so much, and its last search began so many steps ago.
_EVERY, _RECENT, _MOVED, _PATIENCE = 5, 10, 0.2, 1000


class Key(NamedTuple):
    """What decides how long a choice takes; each key has a choice of its own.

    Attributes:
        kind: phase, dtype and sizes, as a text.
        bucket: of the capacity.
    """

    kind: str
    bucket: int

    @classmethod
    def of(cls, phase: str, dtype: str, sizes: str, capacity: int) -> Key:
        """The key of a step whose ranks send up to ``capacity`` rows to an expert."""
        return cls(f"{phase}/{dtype}/{sizes}", capacity // WINDOW)

    def __str__(self) -> str:
        return f"{self.kind}/{self.bucket}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """The inverse of ``str``."""
        kind, _, bucket = text.rpartition("/")
        return cls(kind, int(bucket))


class Order(NamedTuple):
    """What a step does.

    Attributes:
        step: its number.
        choice: by the names of the axes.
        measured: whether a sample of it is wanted.
    """

    step: int
    choice: dict[str, Any]
    measured: bool


class Event(NamedTuple):
    """Something to write down.

    Attributes:
        what: ``trial`` (a choice was tried), ``unfit`` (it cannot be), ``decision`` (a key has its
            choice), ``drift`` (it is to be searched again).
        step: number of the step that was about to begin.
        key, choice: of it.
        samples: microseconds, of a trial.
        time, baseline: median microseconds of the choice and of the one that the search began with,
            of a decision.
        trials: of a decision, how many it took.
    """

    what: str
    step: int
    key: Key
    choice: dict[str, Any]
    samples: tuple[int, ...] = ()
    time: int = 0
    baseline: int = 0
    trials: int = 0


@dataclass
class Entry:
    """What is known of a key.

    Attributes:
        choice, time, baseline, trials: of the last decision, if there was one.
        search: under way; None where the key is decided.
        samples: of the trial that is under way.
        ordered: steps that it was given.
        trial: its number; samples that come late are known by it.
        opened: step at which the search began.
        recent: samples since the decision.
    """

    choice: Choice
    search: Search | None
    time: int = 0
    baseline: int = 0
    trials: int = 0
    samples: list[int] = field(default_factory=list)
    ordered: int = 0
    trial: int = 0
    opened: int = 0
    recent: collections.deque = field(default_factory=lambda: collections.deque(maxlen=_RECENT))

    @property
    def current(self) -> Choice:
        """What is best as far as is known."""
        return self.choice if self.search is None else self.search.best


class Tuner:
    """One run's choices, by key.

    Args:
        space: what can be chosen.
        steps: of a trial; the first one is not measured (it may connect and allocate).
        max_loss: part of the run's time that trials may have cost before no further one begins.
        fits: whether a choice can be run for a key, asked once per trial; it must not differ
            between ranks. None: all can.
        start: the choice that the first search at a key begins with where no other key has one;
            None: the simplest.

    Attributes:
        entries: what is known, by key.
        step: number of the next step.
        run_time, lost_time: microseconds of the run so far, and of them what trials cost.
        last_sample: microseconds of the last step that was measured, None before there was one.
    """

    def __init__(
        self,
        space: Space,
        *,
        steps: int = 5,
        max_loss: float = 0.02,
        fits: Callable[[Key, Mapping[str, Any]], bool] | None = None,
        start: Callable[[Key], Mapping[str, Any]] | None = None,
    ):
        self.space = space
        self.steps, self.max_loss = steps, max_loss
        self._fits = fits or (lambda key, choice: True)
        self._start = start
        self.entries: dict[Key, Entry] = {}
        self.step = self.run_time = self.lost_time = 0
        self.last_sample: int | None = None
        self._ring = Ring()
        self._events: list[Event] = []
        self._seal = 0

    # a step of training: words -> all ranks' table -> settle -> begin

    @property
    def awaited(self) -> list[int]:
        """Steps of which samples are wanted."""
        return self._ring.steps

    @property
    def is_searching(self) -> bool:
        """Whether a key has no choice yet."""
        return not self.entries or any(e.search is not None for e in self.entries.values())

    def words(self, elapsed: int, measured: Mapping[int, int]) -> list[int]:
        """This rank's line of the table; as many integers on every rank and in every step.

        Args:
            elapsed: microseconds since the step before began.
            measured: microseconds by step, of those that are known here.
        """
        return [self._seal, elapsed, *self._ring.words(measured)]

    @staticmethod
    def num_words() -> int:
        """Length of :meth:`words`."""
        return 2 + SLOTS

    def settle(self, table: Sequence[Sequence[int]]) -> None:
        """Take note of what all ranks measured.

        Raises:
            ValueError: the ranks' states differ, as when they began with different files.
        """
        seals, elapsed, *slots = zip(*table, strict=True)
        if len(set(seals)) > 1:
            raise ValueError(
                "MoE ranks disagree on what the tuner found so far: do all of them read the same "
                "checkpoint and the same file of choices?"
            )
        self.run_time += min(elapsed)
        for sample in self._ring.settle(list(zip(*slots, strict=True))):
            self.last_sample = sample.microseconds
            self._note(sample)

    def begin(self, key: Key) -> Order:
        """What the next step does. The same on all ranks, as their keys are."""
        entry = self.entries.get(key) or self._open(key)
        choice, measured = self._next(key, entry)
        order = Order(self.step, self.space.values(choice), measured)
        if measured:
            self._ring.expect(self.step, (key, entry.trial))
        self.step += 1
        return order

    def take_events(self) -> list[Event]:
        """What happened since they were last taken."""
        events, self._events = self._events, []
        return events

    def reseal(self) -> None:
        """After a state was loaded: begin to compare ranks by what they have."""
        told = (self.step, sorted((str(k), e.current, e.trial) for k, e in self.entries.items()))
        self._seal = zlib.crc32(repr(told).encode())

    # what follows from it

    def _open(self, key):
        """A new key begins where the nearest one that is decided ended."""
        decided = [
            other
            for other, entry in self.entries.items()
            if other.kind == key.kind and entry.search is None
        ]
        nearest = min(decided, key=lambda o: (abs(o.bucket - key.bucket), o.bucket), default=None)
        near = False
        if nearest is not None:
            start = self.entries[nearest].choice
            lower, upper = sorted((nearest.bucket, key.bucket))
            near = upper - lower == 1 and lower >= _ALIKE
        elif self._start is not None:
            start = self.space.choice(self._start(key))
        else:
            start = self.space.simplest
        entry = Entry(start, Search(self.space, start, near=near), opened=self.step)
        self.entries[key] = entry
        return entry

    def _next(self, key, entry):
        """(choice, whether to measure it)."""
        if entry.search is not None and not entry.ordered:
            if entry.search.history and self.lost_time > self.max_loss * self.run_time:
                return entry.current, False
            self._skip_unfit(key, entry)
        if entry.search is None:
            return entry.choice, self.step % _EVERY == 0
        entry.ordered += 1
        if entry.ordered > 4 * self.steps + SLOTS and not entry.samples:
            self._end_trial(key, entry, None)  # nothing can be measured
            return self._next(key, entry)
        return entry.search.candidate, entry.ordered > 1

    def _skip_unfit(self, key, entry):
        while entry.search is not None:
            choice = entry.search.candidate
            if choice == entry.search.start or self._fits(key, self.space.values(choice)):
                return
            self._end_trial(key, entry, None)

    def _note(self, sample: Sample) -> None:
        key, trial = sample.owner
        entry = self.entries[key]
        if trial != entry.trial:
            return  # of a trial that is over
        if entry.search is None:
            self._watch(key, entry, sample.microseconds)
            return
        entry.samples.append(sample.microseconds)
        best = entry.search.time(entry.search.best)
        limit = dict(enumerate(_HOPELESS, start=1)).get(len(entry.samples))
        hopeless = best is not None and limit is not None and min(entry.samples) > limit * best
        if len(entry.samples) >= self.steps - 1 or hopeless:
            self._end_trial(key, entry, entry.samples)

    def _end_trial(self, key, entry, samples):
        search, choice = entry.search, entry.search.candidate
        search.put(samples)
        if samples is None:
            self._tell("unfit", key, choice)
        else:
            behind = median(samples) - search.time(search.best)
            self.lost_time += max(0, behind) * entry.ordered
            self._tell("trial", key, choice, samples=tuple(samples))
        entry.samples, entry.ordered, entry.trial = [], 0, entry.trial + 1
        if search.candidate is not None:
            return
        entry.choice, entry.search = search.best, None
        entry.time = search.time(search.best) or 0
        entry.baseline = search.time(search.start) or 0
        entry.trials = sum(samples is not None for _, samples in search.history)
        entry.recent.clear()
        self._tell(
            "decision",
            key,
            entry.choice,
            time=entry.time,
            baseline=entry.baseline,
            trials=entry.trials,
        )

    def _watch(self, key, entry, microseconds):
        """Search again where a decided choice takes another time than it did."""
        entry.recent.append(microseconds)
        if len(entry.recent) < _RECENT or self.step - entry.opened < _PATIENCE or not entry.time:
            return
        now = median(entry.recent)
        if abs(now - entry.time) > _MOVED * entry.time:
            self._tell("drift", key, entry.choice, time=now, baseline=entry.time)
            entry.search, entry.opened = Search(self.space, entry.choice), self.step
            entry.trial += 1

    def _tell(self, what, key, choice, **more):
        event = Event(what, self.step, key, self.space.values(choice), **more)
        self._events.append(event)
        self._seal = zlib.crc32(repr(event).encode(), self._seal)
