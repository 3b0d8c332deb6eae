"""Space of choices, and the search that names the next choice to try.

Coordinate descent, axis by axis; then the neighbours of the winner again, since the axes interact
(Tutel, arXiv 2206.03382, section 2.3); then a rematch of choices whose times are too close for
their noise. For 2 algorithms, 4 overlap degrees and 5 values of r this takes at most 14 trials.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Times that differ by a smaller share are a tie; the simpler choice wins.
TIE = 0.03
# The rematch: rounds, choices in each, and standard errors that are a clear difference.
_ROUNDS, _CONTENDERS, _CLEAR = 8, 4, 2.6
_TRIALS = 12  # before the rematch; neighbours are tried up to this number

Samples = Sequence[int]  # microseconds
# Number of the value on each axis, in their order; all ranks compute with integers.
Choice = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """One field that can be chosen."""

    name: str  # field of ExchangeConfig
    values: tuple[Any, ...]  # the simplest first
    # the time has one minimum along the values; otherwise each is tried
    ordered: bool = True
    # values outside that order, tried last, for which other axes have no effect
    standalone: tuple[Any, ...] = ()

    @property
    def all_values(self) -> tuple[Any, ...]:
        return (*self.values, *self.standalone)


class Space:
    """All choices; the axes are searched in their order."""

    def __init__(self, axes: Sequence[Axis]):
        self.axes = tuple(axes)
        self.simplest: Choice = (0,) * len(self.axes)

    def values(self, choice: Choice) -> dict[str, Any]:
        return {axis.name: axis.all_values[n] for axis, n in zip(self.axes, choice, strict=True)}

    def choice(self, values: Mapping[str, Any]) -> Choice:
        """Invert :meth:`values`; raise ValueError if an axis is missing or has no such value."""
        for axis in self.axes:
            if values.get(axis.name) not in axis.all_values:
                listing = ", ".join(map(str, axis.all_values))
                raise ValueError(f"{axis.name}={values.get(axis.name)!r} is none of {listing}")
        return tuple(axis.all_values.index(values[axis.name]) for axis in self.axes)

    def is_standalone(self, choice: Choice) -> bool:
        return any(n >= len(axis.values) for axis, n in zip(self.axes, choice, strict=True))

    def complexity(self, choice: Choice) -> tuple:
        """Return a sort key: the smaller, the simpler. It is unique."""
        return sum(choice), choice

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yield choices one step away, any value of unordered axes, and the standalone ones."""
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
    """Return an integer, the same on all ranks: the mean of two is rounded down."""
    return int(statistics.median(samples))


def deviation(samples: Samples) -> int:
    """Return the median absolute deviation from the median."""
    return median([abs(sample - median(samples)) for sample in samples])


class Search:
    """One search; a search made from a history is where the history ended.

    ``start`` is tried first, and others have to beat it. ``history`` has (choice, samples) of every
    trial in order, samples None if it cannot run. ``candidate`` is the choice to try now, None at
    the end; ``best`` the winner so far.
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
                raise ValueError(f"this search tries {self.candidate} next, not {choice}")
            self.put(samples)

    def put(self, samples: Samples | None) -> None:
        """Take samples of the candidate, at least one, or None if it cannot run."""
        choice, samples = self.candidate, None if samples is None else list(samples)
        self.history.append((choice, samples))
        if samples is not None:
            self._samples.setdefault(choice, []).extend(samples)
            self.best = min(self._samples, key=self._rank)
        self.candidate = next(self._run, None)

    def time(self, choice: Choice) -> int | None:
        """Return the median of all samples of a choice; None without samples."""
        return median(self._samples[choice]) if choice in self._samples else None

    # Coroutines: they yield a choice and resume when it has samples.

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
        """Go up from the best while times improve; go down if they never did."""
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
        """Try the neighbours of the best, and repeat if one of them is better."""
        origin = None
        while origin != self.best and len(self.history) < _TRIALS:
            origin = self.best
            for choice in self.space.neighbours(origin):
                if len(self.history) < _TRIALS:
                    yield from self._try(choice)

    def _rematch(self):
        """Measure the start anew, and repeat close choices until one is clearly the fastest."""
        if self.best not in self._samples:
            return
        if self.best != self.start:  # the first steps of a process may have been slow
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
        """Best choice without a standalone value; the descent along the axes starts there."""
        first = self.space.simplest if self.space.is_standalone(self.start) else self.start
        tried = [choice for choice in self._samples if not self.space.is_standalone(choice)]
        return min(tried, key=self._rank, default=first)

    def _rank(self, choice: Choice) -> tuple:
        return self.time(choice), self.space.complexity(choice)

    def _doubt(self, choice: Choice, other: Choice) -> float:
        """Return the microseconds by which two choices must differ to be clearly different."""
        # relative deviation of the samples of most choices
        found = [deviation(s) / max(1, median(s)) for s in self._samples.values() if len(s) > 2]
        noise = statistics.median_low(found) if found else 0.0
        # for normal samples sigma is 1.48 deviations, and a median's error 1.25 times a mean's
        errors = [
            1.48 * 1.25 * noise * self.time(each) / math.sqrt(len(self._samples[each]))
            for each in (choice, other)
        ]
        return _CLEAR * math.hypot(*errors)

    def _close(self) -> list[Choice]:
        """Return the choices that may be the fastest, if that matters."""
        ordered = sorted(self._samples, key=lambda choice: (self.time(choice), choice))
        first = ordered[0]

        def unclear(choice):
            behind, doubt = self.time(choice) - self.time(first), self._doubt(choice, first)
            return choice == first or behind < doubt and doubt > TIE * self.time(first) / 2

        return [choice for choice in ordered if unclear(choice)][:_CONTENDERS]

    def _may_be_faster(self, choice: Choice, other: Choice) -> bool:
        """Return whether a choice is faster or not clearly slower; False if it cannot run."""
        mine, others = self.time(choice), self.time(other)
        if mine is None or others is None:
            return mine is not None
        return mine < others + self._doubt(choice, other)
