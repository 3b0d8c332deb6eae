"""One text per option: help, range, choices and flag of an option stand once, beside its default.

:func:`option` makes a field of a dataclass, which :func:`documented` documents,
:func:`check_options` checks and a host offers as flags, keys of a schema and rows of a table
(:mod:`fairseq_tutel.integrations.fairseq.options.fields`). Numbers must be finite in any case: a
nan compares as false with every bound, and would train as if the option had not been given.

A text names other options between backticks, as arguments in Python (```top_k=1```), of which
:func:`with_flags` makes ``--moe-top-k 1``.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

SAME = "as in Python"  # the default of option(flag_default=)
# by the name of a field's type, which is a text where annotations are postponed
_KINDS = {kind.__name__: kind for kind in (int, float, bool, str)}


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``low`` to ``high``; an open end is not itself in the range."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        return math.isfinite(number) and above and below

    def __str__(self) -> str:
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        high = f"{'below' if self.high_open else 'at most'} {self.high:g}"
        ends = [text for end, text in ((self.low, low), (self.high, high)) if math.isfinite(end)]
        return " and ".join(ends) or "a finite number"

    def objection(self, number: float) -> str | None:
        """What a number that is not in the range must be; None if it is."""
        if number in self:
            return None
        return f"must be {self if math.isfinite(number) else FINITE}"


FINITE = Range()
FRACTION = Range(0, 1)


def at_least(low: float) -> Range:
    """Finite numbers from ``low`` on."""
    return Range(low)


def above(low: float) -> Range:
    """Finite numbers greater than ``low``."""
    return Range(low, low_open=True)


def option(
    default: Any,
    help: str,
    allowed: Range | None = None,
    *,
    choices: Sequence[Any] | None = None,
    flag: str | None = None,
    flag_default: Any = SAME,
    note: str = "",
    or_auto: bool = False,
    group: str | None = None,
) -> Any:
    """A field of a dataclass of options.

    Args:
        allowed: range of a number; by default any that is finite.
        flag: on the command line; by default made of the name of the field.
        flag_default: the command line's, where that is another; None: as in Python if not given.
        note: what the command line adds to the help.
        or_auto: on the command line it may be ``auto``, too.
        group: part of the help in which the option stands, if not that of its class.
    """
    if allowed is None and isinstance(default, (int, float)) and not isinstance(default, bool):
        allowed = FINITE
    metadata = {
        "help": help,
        "note": note,
        "range": allowed,
        "choices": None if choices is None else tuple(choices),
        "flag": flag,
        "flag_default": flag_default,
        "or_auto": or_auto,
        "group": group,
    }
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: dataclasses.Field, prefix: str = "moe") -> str:
    """An option's name on the command line, as of a variable: ``moe_top_k``."""
    flag = field.metadata.get("flag") or f"{prefix}_{field.name}"
    return flag.lstrip("-").replace("-", "_")


_Class = TypeVar("_Class", bound=type)


def documented(options: _Class) -> _Class:
    """Decorator of a dataclass of options: its docstring lists them with their help texts."""
    entries = []
    for field in dataclasses.fields(options):
        text = f"{field.name}: {field.metadata['help']}."
        given = field.metadata["flag_default"]
        if given not in (SAME, None):
            text += f" The command line's default is {given}."
        entries.append(textwrap.fill(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8))
    options.__doc__ = "\n".join(
        [inspect.cleandoc(options.__doc__ or ""), "", "Attributes:", *entries]
    )
    return options


def check_options(options: Any) -> None:
    """Hold the values of a dataclass of options against what its fields state, or raise ValueError.

    A whole number becomes a float where that is meant, an Enum of the host the text of its value.
    """
    for field in dataclasses.fields(options):
        value, choices = getattr(options, field.name), field.metadata.get("choices")
        kind = _KINDS.get(getattr(field.type, "__name__", field.type))
        if kind is float and type(value) is int:
            value = float(value)
        elif kind is str:
            value = str(getattr(value, "value", value))
        elif kind and not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            wanted = "a whole number" if kind is int else f"of type {kind.__name__}"
            raise ValueError(f"{field.name}={value!r} must be {wanted}")
        object.__setattr__(options, field.name, value)
        if choices is not None and value not in choices:
            listing = ", ".join(map(str, choices))
            raise ValueError(f"{field.name}={value!r} is unknown; choose one of {listing}")
    check_ranges(options, type(options), as_argument)


def as_flag(name: str, value: Any) -> str:
    """``--moe-gate-noise 0.5``, as on a command line."""
    return f"--{name.replace('_', '-')} {value}"


def as_argument(name: str, value: Any) -> str:
    """``gate_noise=0.5``, as in Python."""
    return f"{name}={value}"


def check_ranges(values: Any, options: type, spell: Callable[[str, Any], str] = as_flag) -> None:
    """Hold numbers among the attributes of ``values`` against the ranges of a dataclass of options.

    ValueError has one line about all that lie outside, each as ``spell(name, value)`` has it.
    """
    wrong = []
    for field in dataclasses.fields(options):
        allowed, value = field.metadata.get("range"), getattr(values, field.name, None)
        # other than a number: a choice, or an interpolation that is resolved elsewhere
        if allowed is not None and isinstance(value, (int, float)) and value not in allowed:
            wrong.append(f"{spell(field.name, value)} {allowed.objection(value)}")
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
        if objection := allowed.objection(number):
            raise argparse.ArgumentTypeError(f"{text} {objection}")
        return number

    return convert


class OptionError(ValueError):
    """Options that contradict each other, which the text names between backticks."""

    def __init__(self, text: str):
        super().__init__(text.replace("`", ""))
        self.text = text


_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")


def with_flags(text: str, *configs: type) -> str:
    """A text whose options, of these dataclasses, are spelled as on a command line."""
    flags = {field.name: flag_name(field) for each in configs for field in dataclasses.fields(each)}

    def spelled(argument: re.Match) -> str:
        name, value = argument.groups()
        if name not in flags:
            return argument[0].strip("`")
        flag = "--" + flags[name].replace("_", "-")
        return flag if value in (None, "True") else f"{flag} {value.strip(chr(39))}"

    return _ARGUMENT.sub(spelled, text)
