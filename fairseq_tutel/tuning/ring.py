"""Samples of the last steps, which a rank may have some steps later than another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Steps whose samples are waited for: a GPU is rarely further behind the host.
SLOTS = 4
MISSING = -1


class Sample(NamedTuple):
    """Of a step.

    Attributes:
        step: its number.
        owner: what was given to :meth:`Ring.expect`.
        microseconds: the smallest of all ranks'. A rank that arrives last in an exchange waits
            least, so that their skew cancels, while slow links hold everybody.
    """

    step: int
    owner: Any
    microseconds: int


class Ring:
    """The steps whose samples are not known on all ranks yet; the same on every rank."""

    def __init__(self):
        self._waiting: list[tuple[int, Any]] = []

    def expect(self, step: int, owner: Any) -> None:
        """A step that is measured begins; the oldest one is given up where there is no room."""
        self._waiting = [*self._waiting, (step, owner)][-SLOTS:]

    @property
    def steps(self) -> list[int]:
        """That are waited for."""
        return [step for step, _ in self._waiting]

    def words(self, measured: Mapping[int, int]) -> list[int]:
        """One integer per slot: microseconds by step, of those that this rank has."""
        mine = [measured.get(step, MISSING) for step in self.steps]
        return mine + [MISSING] * (SLOTS - len(mine))

    def settle(self, table: Sequence[Sequence[int]]) -> list[Sample]:
        """Samples that all ranks have now; the others are waited for further.

        Args:
            table: the words of every rank.
        """
        found, waiting = [], []
        for (step, owner), values in zip(self._waiting, zip(*table, strict=True), strict=False):
            if MISSING in values:
                waiting.append((step, owner))
            else:
                found.append(Sample(step, owner, min(values)))
        self._waiting = waiting
        return found
