"""What can be chosen, and which choice to try next, given the times of those that were tried.

Coordinate descent, axis by axis, then the neighbours of the winner again (the axes interact: Tutel,
arXiv 2206.03382, section 2.3), then a rematch where times are too close for their noise: at most 13
of 2 algorithms, 4 degrees of overlap and 5 parallelisms, 14 where a search begins at r = 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of a time: choices that differ by less are a tie, which the simpler one wins.
TIE = 0.03
# Of the rematch: rounds, choices in each, and how many standard errors are clear.
_ROUNDS, _CONTENDERS, _CLEAR = 8, 4, 2.6
_TRIALS = 12  # before the rematch: neighbours are tried up to this number

Samples = Sequence[int]  # microseconds
# Of every axis the number of a value, in the order of the axes: all ranks compute with integers.
Choice = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """One thing that can be chosen."""

    name: str  # field of ExchangeConfig
    values: tuple[Any, ...]  # from the simplest on
    # whether the time has one minimum along the values; else each is tried
    ordered: bool = True
    # values outside that order, tried last, where all other axes have no effect
    standalone: tuple[Any, ...] = ()

    @property
    def all_values(self) -> tuple[Any, ...]:
        return (*self.values, *self.standalone)


class Space:
    """Every choice that there is; axes in the order in which they are searched."""

    def __init__(self, axes: Sequence[Axis]):
        self.axes = tuple(axes)
        self.simplest: Choice = (0,) * len(self.axes)

    def values(self, choice: Choice) -> dict[str, Any]:
        return {axis.name: axis.all_values[n] for axis, n in zip(self.axes, choice, strict=True)}

    def choice(self, values: Mapping[str, Any]) -> Choice:
        """The inverse of :meth:`values`; ValueError if an axis is missing or has no such value."""
        for axis in self.axes:
            if values.get(axis.name) not in axis.all_values:
                listing = ", ".join(map(str, axis.all_values))
                raise ValueError(f"{axis.name}={values.get(axis.name)!r} is none of {listing}")
        return tuple(axis.all_values.index(values[axis.name]) for axis in self.axes)

    def is_standalone(self, choice: Choice) -> bool:
        return any(n >= len(axis.values) for axis, n in zip(self.axes, choice, strict=True))

    def complexity(self, choice: Choice) -> tuple:
        """The smaller, the simpler; no two choices have the same."""
        return sum(choice), choice

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Choices one step away; of axes without order any; standalone ones, which have none."""
        if self.is_standalone(choice):
            return
        for index, axis in enumerate(self.axes):
            for number in range(len(axis.values)):
                distance = abs(number - choice[index])
                if distance == 1 or distance and not axis.ordered:
                    yield self.with_value(choice, index, number)
            yield from self.standalone_choices(index)

    def standalone_choices(self, index: int) -> Iterator[Choice]:
        axis = self.axes[index]
        for number in range(len(axis.values), len(axis.all_values)):
            yield self.with_value(self.simplest, index, number)

    def with_value(self, choice: Choice, index: int, number: int) -> Choice:
        return (*choice[:index], number, *choice[index + 1 :])


def median(samples: Samples) -> int:
    """An integer, the same on all ranks: the mean of two is rounded down."""
    ordered, half = sorted(samples), len(samples) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


def deviation(samples: Samples) -> int:
    """Median absolute deviation from the median."""
    return median([abs(sample - median(samples)) for sample in samples])


class Search:
    """One search, as far as it has come; made again from its history it is where it was.

    ``start`` is tried first; the others have to beat it. ``candidate``: the choice to try now, None
    at the end; ``best``: the winner so far, ``start`` before anything was tried; ``history``:
    (choice, samples) of every trial in order, samples None where it cannot be run. Raises
    ValueError for a history that no such search has.
    """

    def __init__(
        self, space: Space, start: Choice, history: Sequence[tuple[Choice, Samples | None]] = ()
    ):
        self.space, self.start = space, start
        self.best = start
        self.history: list[tuple[Choice, list[int] | None]] = []
        self._samples: dict[Choice, list[int]] = {}
        self._run = self._trials()
        self.candidate: Choice | None = next(self._run)
        for choice, samples in history:
            if choice != self.candidate:
                raise ValueError(f"this search tries {self.candidate} next, and not {choice}")
            self.put(samples)

    def put(self, samples: Samples | None) -> None:
        """Samples of the candidate, one at least, or None if it cannot be run."""
        choice, samples = self.candidate, None if samples is None else list(samples)
        self.history.append((choice, samples))
        if samples is not None:
            self._samples.setdefault(choice, []).extend(samples)
            self.best = min(self._samples, key=self._rank)
        self.candidate = next(self._run, None)

    def time(self, choice: Choice) -> int | None:
        """Median of all samples of a choice, None if there are none."""
        return median(self._samples[choice]) if choice in self._samples else None

    # Coroutines: they yield a choice and go on when its samples are there.

    def _try(self, choice: Choice) -> Iterator[Choice]:
        if all(choice != before for before, _ in self.history):
            yield choice

    def _trials(self):
        yield from self._try(self.start)
        yield from self._try(self._inside)
        for index, axis in enumerate(self.space.axes):
            if axis.ordered:
                yield from self._walk(index)
                continue
            for number in range(len(axis.values)):
                yield from self._try(self.space.with_value(self._inside, index, number))
        for index in range(len(self.space.axes)):
            for choice in self.space.standalone_choices(index):
                yield from self._try(choice)
        yield from self._descend()
        yield from self._rematch()

    def _walk(self, index):
        """Up from the best while it gets faster; down if it never did."""
        origin = self._inside
        for direction in (1, -1):
            before, number = origin, origin[index] + direction
            while 0 <= number < len(self.space.axes[index].values):
                choice = self.space.with_value(origin, index, number)
                yield from self._try(choice)
                if not self._may_be_faster(choice, before):
                    break
                before, number = choice, number + direction
            if before != origin:
                return

    def _descend(self):
        """To the neighbours of the best, and on from there if one of them is better."""
        origin = None
        while origin != self.best and len(self.history) < _TRIALS:
            origin = self.best
            for choice in self.space.neighbours(origin):
                if len(self.history) < _TRIALS:
                    yield from self._try(choice)

    def _rematch(self):
        """Whoever may be the fastest, until that is clear; the start anew."""
        if self.best not in self._samples:
            return
        if self.best != self.start:  # its times may be those of the first steps of a process
            self._samples.pop(self.start, None)
            yield self.start
        for _ in range(_ROUNDS):
            close = self._close()
            if len(close) < 2:
                break
            yield from close
        fastest = min(self._samples, key=self._rank)
        limit = (1 + TIE) * self.time(fastest)

        def ties(choice):
            return choice == fastest or self.time(choice) + self._doubt(choice, fastest) <= limit

        self.best = min(filter(ties, self._samples), key=self.space.complexity)

    @property
    def _inside(self) -> Choice:
        """The best without a standalone value: where the descent along the axes is."""
        first = self.space.simplest if self.space.is_standalone(self.start) else self.start
        tried = [choice for choice in self._samples if not self.space.is_standalone(choice)]
        return min(tried, key=self._rank, default=first)

    def _rank(self, choice: Choice) -> tuple:
        return self.time(choice), self.space.complexity(choice)

    def _doubt(self, choice: Choice, other: Choice) -> float:
        """Microseconds by which the times of two choices have to differ to be clearly different."""
        # of most choices: the deviation of a sample relative to its median
        found = [deviation(s) / max(1, median(s)) for s in self._samples.values() if len(s) > 2]
        noise = statistics.median_low(found) if found else 0.0
        # of normally distributed samples: sigma is 1.48 deviations, the median's error 1.25 means'
        errors = [
            1.48 * 1.25 * noise * self.time(each) / math.sqrt(len(self._samples[each]))
            for each in (choice, other)
        ]
        return _CLEAR * math.hypot(*errors)

    def _close(self) -> list[Choice]:
        """Choices of which it matters, and is unclear, whether they are the fastest."""
        ordered = sorted(self._samples, key=lambda choice: (self.time(choice), choice))
        first = ordered[0]

        def unclear(choice):
            behind, doubt = self.time(choice) - self.time(first), self._doubt(choice, first)
            return choice == first or behind < doubt and doubt > TIE * self.time(first) / 2

        return [choice for choice in ordered if unclear(choice)][:_CONTENDERS]

    def _may_be_faster(self, choice: Choice, other: Choice) -> bool:
        """Whether it is faster, or not clearly slower; what cannot be run is not."""
        mine, others = self.time(choice), self.time(other)
        if mine is None or others is None:
            return mine is not None
        return mine < others + self._doubt(choice, other)
