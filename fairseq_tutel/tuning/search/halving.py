"""Successive halving over a list of choices, the simplest first.

Round one takes one sample of each choice that is next to a fast one. Each later round measures the
faster half of the close choices again, longer. What comes next follows from the samples alone, so
that a search goes on from a file.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Choice = Mapping[str, Any]  # by field of ExchangeConfig

_ROUNDS = 4
# Round one tries the neighbours of choices that take at most NEAR times as long as the best one
# with neighbours, and FAR times as long as the best one.
_NEAR, _FAR = 1.05, 2
_CLOSE = 1.1  # later rounds measure choices that take at most so many times as long as the best
_TIE = 1.03  # the simplest choice wins that takes at most so many times as long as the best


def list_choices(values: Mapping[str, Sequence[Any]], most: int | None = None) -> list[Choice]:
    """List the products of the fields' values, the simplest first and r = 0 last.

    ``values`` are the simplest first. r = 0 sends no tokens, so that other fields have no effect.
    """
    sent = {name: [v for v in of if name != "r" or v] for name, of in values.items()}
    numbers = itertools.product(*(range(len(of)) for of in sent.values()))
    ordered = sorted(numbers, key=lambda each: (sum(each), each))
    choices = [
        {name: sent[name][n] for name, n in zip(sent, each, strict=True)} for each in ordered
    ]
    none = [{**choices[0], "r": 0}] if 0 in values.get("r", ()) else []
    return [*choices[: most and most - len(none)], *none]


def neighbours(choices: Sequence[Choice]) -> list[set[int]]:
    """Return, for each choice, those that differ in one field, without another value between.

    Nothing is like r = 0.
    """

    def are(one: Choice, other: Choice) -> bool:
        fields = [name for name in one if one[name] != other[name]]
        if len(fields) != 1 or 0 in (one.get("r"), other.get("r")):
            return False
        low, high = sorted((one[fields[0]], other[fields[0]]))
        return isinstance(low, str) or not any(low < c[fields[0]] < high for c in choices)

    return [{n for n, other in enumerate(choices) if are(one, other)} for one in choices]


def median(samples: Sequence[int]) -> int:
    """Return an integer, so that all ranks compute the same."""
    return int(statistics.median(samples))


class Search:
    """Search of one key among choices, by number; ``start`` is tried first.

    ``near`` is from :func:`neighbours`. ``choice`` is the one to try, and ``round`` its round; at
    the end the winner and 0.
    """

    def __init__(self, near: Sequence[set[int]], start: int, opened: int = 0):
        self.near, self.start, self.opened = near, start, opened
        self.choice, self.round = start, 1
        # samples in microseconds of a choice in each of its rounds; no round if it cannot run
        self.trials: dict[int, list[list[int]]] = {}
        self.found = {"us": 0, "baseline_us": 0, "trials": 0}  # at the end
        self.samples: list[int] = []  # of the trial under way
        self.num_steps = 0

    @property
    def times(self) -> dict[int, int]:
        """Median of each choice with samples."""
        return self._medians(_ROUNDS)

    @property
    def best(self) -> int:
        """Winner, or the fastest choice so far; ``start`` without samples."""
        times = self.times if self.round else {self.choice: 0}
        return min(times, key=lambda n: (times[n], n), default=self.start)

    def end_trial(self) -> None:
        """Take the samples of the trial, none if the choice cannot run, and plan the next one."""
        before = self.trials.get(self.choice, [])
        self.trials[self.choice] = [*before, self.samples] if self.samples else []
        self.samples, self.num_steps = [], 0
        self.plan()

    def plan(self) -> None:
        """Set the choice to try next and its round by the trials so far."""
        times = self.times
        if self.start not in self.trials:
            self.choice, self.round = self.start, 1
        elif untried := self._untried(times):
            # those without neighbours first
            self.choice, self.round = min(untried, key=lambda n: (len(self.near[n]) > 0, n)), 1
        else:
            self.choice, self.round = self._later_round(times)
        if not self.round:
            us, baseline = (times.get(n, 0) for n in (self.choice, self.start))
            number = sum(map(len, self.trials.values()))
            self.found = {"us": us, "baseline_us": baseline, "trials": number}

    def _untried(self, times: dict[int, int]) -> list[int]:
        """Return what round one has to try: the simplest choice, and neighbours of fast ones."""
        joined = {n: us for n, us in times.items() if self.near[n]}
        best = [min(each.values(), default=0) for each in (joined, times)]
        fast = {n for n, us in joined.items() if us <= min(_NEAR * best[0], _FAR * best[1])}
        numbers = [n for n in range(len(self.near)) if n not in self.trials]
        return [n for n in numbers if n == 0 or not self.near[n] or self.near[n] & fast]

    def _later_round(self, times: dict[int, int]) -> tuple[int, int]:
        """Return the next choice and round of those that are still close, or the winner and 0."""
        close = set(times)
        for number in range(2, _ROUNDS + 1):
            before = self._medians(number - 1)
            ranked = sorted((before[n], n) for n in close)
            half = ranked[: (len(ranked) + 1) // 2]
            close = {n for us, n in half if us <= _CLOSE * ranked[0][0]}
            if number == 2:
                close |= {self.start} & times.keys()
            if len(close) < 2:
                break
            for choice in sorted(close):
                if len(self.trials[choice]) < number:
                    return choice, number
        limit = _TIE * min((times[n] for n in close), default=0)
        close |= {self.start} & times.keys()
        return min((n for n in close if times[n] <= limit), default=self.start), 0

    def _medians(self, rounds: int) -> dict[int, int]:
        """Return the median of each choice in its first rounds."""
        found = {n: trials[:rounds] for n, trials in self.trials.items() if trials}
        if len(found.get(self.start, ())) > 1:
            found[self.start] = found[self.start][1:]  # the first steps of a process may be slow
        return {n: median(sum(trials, [])) for n, trials in found.items()}
