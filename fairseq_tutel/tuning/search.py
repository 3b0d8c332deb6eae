"""Which choice to try next, given the times of those that were tried.

Coordinate descent, axis by axis, then the neighbours of the winner again (the axes interact: Tutel,
arXiv 2206.03382, section 2.3), then a rematch where times are too close for their noise. The paper
searches a grid that grows with the logarithm of the number of ranks; here at most 13 choices are
tried of 2 algorithms, 4 degrees of overlap and 5 parallelisms, 14 where a search begins at r = 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence

from .space import Choice, Space

# Of a time: choices that differ by less are a tie, which the simpler one wins.
TIE = 0.03
# Rounds in which choices whose times are too close for their noise are tried again, how many of
# them, and how many standard errors are clear.
_ROUNDS, _CONTENDERS, _CLEAR = 8, 4, 2.6
_NARROW = 4  # values that are walked along one by one
_TRIALS = 12  # before the rematch: neighbours are tried up to this number

Samples = Sequence[int]  # microseconds


def median(samples: Samples) -> int:
    """The middle one, or the mean of the two, rounded down: an integer, the same everywhere."""
    ordered, half = sorted(samples), len(samples) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


def deviation(samples: Samples) -> int:
    """Median absolute deviation from the median."""
    middle = median(samples)
    return median([abs(sample - middle) for sample in samples])


class Search:
    """One search, as far as it has come; made again from its history it is where it was.

    Args:
        space: of all choices.
        start: tried first; the others have to beat it.
        near: whether ``start`` won at a key next to this one, so that only its neighbours are
            tried.
        history: of the search that is to go on.

    Attributes:
        candidate: the choice to try now; None at the end.
        best: the winner so far; ``start`` before anything was tried.
        history: (choice, samples) of every trial in order; None for samples of a choice that cannot
            be run.
    """

    def __init__(
        self,
        space: Space,
        start: Choice,
        *,
        near: bool = False,
        history: Sequence[tuple[Choice, Samples | None]] = (),
    ):
        self.space, self.start, self.near = space, start, near
        self.best = start
        self.history: list[tuple[Choice, list[int] | None]] = []
        self._samples: dict[Choice, list[int]] = {}
        # a value apart has no neighbours, and says nothing of the other axes
        self._run = self._near() if near and not space.is_apart(start) else self._whole()
        self.candidate: Choice | None = next(self._run)
        for choice, samples in history:
            if choice != self.candidate:
                raise ValueError(
                    f"a search that tries {self.candidate} next has no trial of {choice}"
                )
            self.put(samples)

    def put(self, samples: Samples | None) -> None:
        """Samples of the candidate, one at least, or None if it cannot be run."""
        choice, samples = self.candidate, None if samples is None else list(samples)
        self.history.append((choice, samples))
        if samples is not None:
            self._samples.setdefault(choice, []).extend(samples)
            self.best = self._fastest()
        try:
            self.candidate = next(self._run)
        except StopIteration:
            self.candidate = None

    def time(self, choice: Choice) -> int | None:
        """Median of all samples of a choice, None if there are none."""
        return median(self._samples[choice]) if choice in self._samples else None

    @property
    def _inside(self) -> Choice:
        """The best without a value apart: where the descent along the axes is."""
        first = self.space.simplest if self.space.is_apart(self.start) else self.start
        tried = [choice for choice in self._samples if not self.space.is_apart(choice)]
        return min(tried, key=self._rank, default=first)

    @property
    def _noise(self) -> float:
        """Median absolute deviation of a sample relative to its median, as most choices have."""
        found = [
            deviation(samples) / max(1, median(samples))
            for samples in self._samples.values()
            if len(samples) > 2
        ]
        return statistics.median_low(found) if found else 0.0

    def _doubt(self, choice: Choice, other: Choice) -> float:
        """Microseconds by which the times of two choices have to differ to be clearly different."""
        # of normally distributed samples: sigma is 1.48 deviations, the median's error 1.25 means'
        errors = [
            1.48 * 1.25 * self._noise * self.time(each) / math.sqrt(len(self._samples[each]))
            for each in (choice, other)
        ]
        return _CLEAR * math.hypot(*errors)

    # which choices, as coroutines that yield one and go on when its samples are there

    def _try(self, choice: Choice) -> Generator[Choice]:
        tried = any(choice == before for before, _ in self.history)
        if not tried:
            yield choice

    def _near(self):
        yield from self._try(self.start)
        for choice in self.space.neighbours(self.start):
            yield from self._try(choice)
        yield from self._rematch()

    def _whole(self):
        yield from self._try(self.start)
        yield from self._try(self._inside)
        for index, axis in enumerate(self.space.axes):
            if not axis.ordered:
                for number in range(len(axis.values)):
                    yield from self._try(self.space.with_value(self._inside, index, number))
            elif len(axis.values) <= _NARROW:
                yield from self._walk(index)
            else:
                yield from self._ternary(index)
        for index, axis in enumerate(self.space.axes):
            for number in range(len(axis.values), len(axis.all_values)):
                yield from self._try(self.space.with_value(self.space.simplest, index, number))
        yield from self._descend()
        yield from self._rematch()

    def _descend(self):
        """To the neighbours of the best, and on from there if one of them is better."""
        origin = None
        while origin != self.best and len(self.history) < _TRIALS:
            origin = self.best
            for choice in self.space.neighbours(origin):
                if len(self.history) < _TRIALS:
                    yield from self._try(choice)

    def _walk(self, index):
        """Up from the best while it gets faster; down if it never did."""
        origin = self._inside
        for direction in (1, -1):
            before, number = origin, origin[index] + direction
            while 0 <= number < len(self.space.axes[index].values):
                choice = self.space.with_value(origin, index, number)
                yield from self._try(choice)
                if not self._faster(choice, before, allowance=1):
                    break
                before, number = choice, number + direction
            if before != origin:
                return

    def _ternary(self, index):
        origin = self._inside
        low, high = 0, len(self.space.axes[index].values) - 1
        while high - low > 2:
            third = (high - low) // 3
            left = self.space.with_value(origin, index, low + third)
            right = self.space.with_value(origin, index, high - third)
            yield from self._try(left)
            yield from self._try(right)
            if self._faster(left, right):
                high = right[index] - 1
            else:
                low = left[index] + 1
        for number in range(low, high + 1):
            yield from self._try(self.space.with_value(origin, index, number))

    def _rematch(self):
        """Whoever may be the fastest, until that is clear; the start anew.

        The start's times may be those of the first steps of a process.
        """
        if self.best not in self._samples:
            return
        if self.best != self.start:
            self._samples.pop(self.start, None)
            yield self.start
        for _ in range(_ROUNDS):
            close = self._close()
            if len(close) < 2:
                break
            yield from close
        fastest = self._fastest()
        limit = (1 + TIE) * self.time(fastest)

        def ties(choice):
            return choice == fastest or self.time(choice) + self._doubt(choice, fastest) <= limit

        self.best = min(filter(ties, self._samples), key=self.space.complexity)

    def _fastest(self) -> Choice:
        return min(self._samples, key=self._rank)

    def _rank(self, choice: Choice) -> tuple:
        return self.time(choice), self.space.complexity(choice)

    def _close(self) -> list[Choice]:
        """Choices that may be the fastest or may not, as far as it matters."""
        ordered = sorted(self._samples, key=lambda choice: (self.time(choice), choice))
        first = ordered[0]

        def unclear(choice):
            behind, doubt = self.time(choice) - self.time(first), self._doubt(choice, first)
            return choice == first or behind < doubt and doubt > TIE * self.time(first) / 2

        return [choice for choice in ordered if unclear(choice)][:_CONTENDERS]

    def _faster(self, choice: Choice, other: Choice, allowance: float = 0) -> bool:
        mine, others = self.time(choice), self.time(other)
        if mine is None or others is None:
            return mine is not None
        return mine < others + allowance * self._doubt(choice, other)
