"""Ranges of numeric options: stated once, beside the option, and checked by one function.

A field of a dataclass of options states its range in its metadata::

    gate_noise: float = field(default=0.0, metadata={"range": at_least(0)})

Whoever has such a dataclass, its values, and a way of spelling its options for the user can check
them (:func:`check_ranges`). Numbers must be finite in any case: a nan compares as false with every
bound, and would train as if the option had not been given.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``low`` to ``high``; an open end is not itself in the range.

    With ``only``, of these numbers alone.
    """

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    only: tuple[float, ...] = ()

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        return math.isfinite(number) and above and below and number in (self.only or (number,))

    def __str__(self) -> str:
        if self.only:
            return f"one of {', '.join(map(str, self.only))}"
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        high = f"{'below' if self.high_open else 'at most'} {self.high:g}"
        ends = [text for end, text in ((self.low, low), (self.high, high)) if math.isfinite(end)]
        return " and ".join(ends) or "a finite number"

    def objection(self, numbers: Iterable[float]) -> str | None:
        """What the first of the numbers that is not in the range must be; None if all are."""
        for number in numbers:
            if number not in self:
                return f"must be {self if math.isfinite(number) else FINITE}"
        return None


FINITE = Range()
FRACTION = Range(0, 1)


def at_least(low: float) -> Range:
    """Finite numbers from ``low`` on."""
    return Range(low)


def one_of(*numbers: float) -> Range:
    """These numbers."""
    return Range(min(numbers), max(numbers), only=numbers)


def ranges_of(options: type) -> dict[str, Range]:
    """The ranges that the fields of a dataclass state, by the name of the field."""
    stated = {field.name: field.metadata.get("range") for field in dataclasses.fields(options)}
    return {name: allowed for name, allowed in stated.items() if allowed is not None}


def as_flag(name: str, value: Any) -> str:
    """``--moe-gate-noise 0.5``, as on a command line."""
    return f"--{name.replace('_', '-')} {value}"


def as_argument(name: str, value: Any) -> str:
    """``gate_noise=0.5``, as in Python."""
    return f"{name}={value}"


def check_ranges(
    values: Any, ranges: Mapping[str, Range], spell: Callable[[str, Any], str] = as_flag
) -> None:
    """Hold options against their ranges.

    Args:
        values: has options as attributes; what it lacks, or has as None, is not checked. A sequence
            of numbers, or text such as ``(0.9, 0.98)``, is checked number by number.
        ranges: by the name of the attribute.
        spell: from the name of the attribute and its value to what the user wrote.

    Raises:
        ValueError: one line about all that lie outside.
    """
    wrong = []
    for name, allowed in ranges.items():
        value = getattr(values, name, None)
        objection = allowed.objection(_numbers(value))
        if objection:
            wrong.append(f"{spell(name, value)} {objection}")
    if wrong:
        raise ValueError("; ".join(wrong))


def in_range(kind: type, allowed: Range) -> Callable[[str], Any]:
    """A ``type=`` of argparse: a number of the kind ``int`` or ``float`` in the range."""

    def convert(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}") from None
        objection = allowed.objection([number])
        if objection:
            raise argparse.ArgumentTypeError(f"{text} {objection}")
        return number

    return convert


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, bool):
        return []
    if isinstance(value, (int, float)):
        return [value]
    if isinstance(value, str):
        try:
            return [float(part) for part in value.strip("()[] ").split(",") if part.strip()]
        except ValueError:
            return []  # a choice, or an interpolation that is resolved elsewhere
    return [n for part in value for n in _numbers(part)] if isinstance(value, Iterable) else []
