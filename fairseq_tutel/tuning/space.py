"""What can be chosen: axes, choices, and which of two choices is the simpler one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of every axis the number of a value, in the order of the axes: all ranks compute with integers.
Choice = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """One thing that can be chosen.

    Attributes:
        name: field of :class:`~fairseq_tutel.config.ExchangeConfig`.
        values: from the simplest on. Each choice of a decision gives one of them.
        ordered: whether the time has one minimum along the values, so that a search may stop where
            it grows; else each value is tried.
        apart: values outside that order, tried last, with all other axes at their simplest values
            because those have no effect then.
    """

    name: str
    values: tuple[Any, ...]
    ordered: bool = True
    apart: tuple[Any, ...] = ()

    @property
    def all_values(self) -> tuple[Any, ...]:
        """All values, those apart last."""
        return (*self.values, *self.apart)


class Space:
    """Every choice that there is.

    Args:
        axes: in the order in which they are searched; at least one value each.
        instead: the choice that is made where values of two axes do not go together, so that a
            search gets by such a pair; None: all do.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        instead: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ):
        self.axes = tuple(axes)
        self._instead = instead

    @property
    def simplest(self) -> Choice:
        """The first value of every axis."""
        return (0,) * len(self.axes)

    def values(self, choice: Choice) -> dict[str, Any]:
        """A choice by the names of its axes."""
        return {
            axis.name: axis.all_values[number]
            for axis, number in zip(self.axes, choice, strict=True)
        }

    def choice(self, values: Mapping[str, Any]) -> Choice:
        """The inverse of :meth:`values`.

        Raises:
            ValueError: an axis is missing or has no such value.
        """
        for axis in self.axes:
            if values.get(axis.name) not in axis.all_values:
                listing = ", ".join(map(str, axis.all_values))
                raise ValueError(f"{axis.name}={values.get(axis.name)!r} is none of {listing}")
        return tuple(axis.all_values.index(values[axis.name]) for axis in self.axes)

    def text(self, choice: Choice) -> str:
        """For logs."""
        return " ".join(f"{name}={value}" for name, value in self.values(choice).items())

    def is_apart(self, choice: Choice) -> bool:
        """Whether some axis has a value outside its order."""
        return any(
            number >= len(axis.values) for axis, number in zip(self.axes, choice, strict=True)
        )

    def complexity(self, choice: Choice) -> tuple:
        """The smaller, the simpler; no two choices have the same."""
        return sum(choice), choice

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Choices one step away: any other value of an axis without order, the next of others.

        Values apart are a step away from every choice inside the order, and have none themselves.
        """
        if self.is_apart(choice):
            return
        for index, axis in enumerate(self.axes):
            for number in range(len(axis.values)):
                distance = abs(number - choice[index])
                if distance == 1 or distance and not axis.ordered:
                    yield self.with_value(choice, index, number)
            for number in range(len(axis.values), len(axis.all_values)):
                yield self.with_value(self.simplest, index, number)

    def with_value(self, choice: Choice, index: int, number: int) -> Choice:
        """A choice with the value ``number`` of the axis ``index``, or what is made instead."""
        changed = (*choice[:index], number, *choice[index + 1 :])
        if self._instead is None:
            return changed
        return self.choice(self._instead(self.values(changed)))
