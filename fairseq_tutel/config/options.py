"""Help text, range, choices and flag of an option, all stated beside its default.

A host makes flags, schema keys and table rows from the fields of a dataclass
(:mod:`fairseq_tutel.integrations.fairseq.options.fields`). Help texts name other options as
arguments in backticks (```top_k=1```). :func:`with_flags` turns them into flags. Numbers must be
finite: nan compares as false with every bound, and would pass as if not given.
"""

import argparse
import dataclasses
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

SAME = "as in Python"  # the default of option(flag_default=)
NO_FLAG = "--"  # option(flag=) of what a host states by options of its own
# by the name of a field's type, because postponed annotations are texts
_KINDS = {kind.__name__: kind for kind in (int, float, bool, str)}


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``low`` to ``high``. An open end is outside the range."""

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
        """Return "must be ..." for a number outside the range, else None."""
        if number in self:
            return None
        return f"must be {self if math.isfinite(number) else FINITE}"


FINITE = Range()
FRACTION = Range(0, 1)


def at_least(low: float) -> Range:
    """Return the range of finite numbers from ``low`` on."""
    return Range(low)


def above(low: float) -> Range:
    """Return the range of finite numbers greater than ``low``."""
    return Range(low, low_open=True)


def option(
    default: Any,
    help: str,
    allowed: Range | None = None,
    *,
    choices: Sequence[Any] | None = None,
    registry: Any = None,
    options: str | None = None,
    flag: str | None = None,
    alias: str | None = None,
    flag_default: Any = SAME,
    note: str = "",
    or_auto: bool = False,
    group: str | None = None,
    needs: Sequence[str] = (),
    const: str | None = None,
) -> Any:
    """Return a field for a dataclass of options.

    Args:
        default: the value if the option is not given.
        help: effect of the option.
        allowed: range of a number (default: any finite one).
        choices: allowed values (default: any).
        registry: ``Registry`` of implementations, one of which the value names.
        options: name of the field that holds the options of that implementation.
        flag: name on the command line (default: made from the field's name); NO_FLAG: none.
        alias: former flag, still accepted.
        flag_default: default on the command line, if another one. None: as in Python if not given.
        note: end of the help text on the command line.
        or_auto: the command line also accepts ``auto``.
        group: section of the help (default: that of the dataclass).
        needs: options of which one must be given (``name``, or ``name=value``), or the option has
            no effect (default: none). :func:`check_needs` reads it.
        const: the value if the flag is given alone (default: the flag needs a value).
    """
    if allowed is None and isinstance(default, (int, float)) and not isinstance(default, bool):
        allowed = FINITE
    metadata = {
        "help": help,
        "note": note,
        "range": allowed,
        "choices": None if choices is None else tuple(choices),
        "registry": registry,
        "options": options,
        "flag": flag,
        "alias": alias,
        "flag_default": flag_default,
        "or_auto": or_auto,
        "group": group,
        "needs": tuple(needs),
        "argparse_const": const,  # fairseq's name
    }
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: dataclasses.Field, prefix: str = "moe") -> str:
    """Return an option's name on the command line as a variable: ``moe_top_k``."""
    return _variable(field.metadata.get("flag") or f"{prefix}_{field.name}")


def alias_name(field: dataclasses.Field) -> str | None:
    """Return the former name of an option as a variable, or None."""
    alias = field.metadata["alias"]
    return alias and _variable(alias)


def _variable(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


_Class = TypeVar("_Class", bound=type)


def documented(options: _Class) -> _Class:
    """Decorate a dataclass: list its options in its docstring, each with type, default, effect."""
    entries = []
    for field in dataclasses.fields(options):
        default = "" if field.default is dataclasses.MISSING else f", default {field.default!r}"
        given = field.metadata["flag_default"]
        if given not in (SAME, None):
            default += f", on the command line {given!r}"
        text = f"{field.name} ({field.type}{default}): {field.metadata['help']}."
        entries.append(textwrap.fill(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8))
    summary = inspect.cleandoc(options.__doc__ or "")
    options.__doc__ = "\n".join([summary, "", "Attributes:", *entries])
    return options


def check_options(options: Any) -> None:
    """Check values of a dataclass of options against its fields; ValueError names what is wrong.

    An int becomes a float for a float field, and a host's Enum becomes its text. The options of a
    chosen implementation become an object of its class ``Options``.
    """
    for field in dataclasses.fields(options):
        value, choices = getattr(options, field.name), field.metadata.get("choices")
        kind = _KINDS.get(str(getattr(field.type, "__name__", field.type)))
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
    check_needs(options, type(options))
    for field in dataclasses.fields(options):
        if (registry := field.metadata.get("registry")) is None:
            continue
        chosen, name = getattr(options, field.name), field.metadata["options"]
        registry.get(chosen)
        if name is not None:
            object.__setattr__(options, name, registry.options(chosen, getattr(options, name)))


def as_flag(name: str, value: Any = "") -> str:
    """Return an option as on a command line: ``--moe-gate-noise 0.5``."""
    return f"--{name.replace('_', '-')} {value}".rstrip()


def as_flags(options: Mapping[str, Any]) -> str:
    """Return options as on a command line; True is a flag alone, None and False are left out."""
    given = {name: v for name, v in options.items() if v is not None and v is not False}
    return " ".join(as_flag(name, "" if v is True else v) for name, v in given.items())


def as_argument(name: str, value: Any) -> str:
    """Return an option as in Python: ``gate_noise=0.5``."""
    return f"{name}={value}"


def check_ranges(values: Any, options: type, spell: Callable[[str, Any], str] = as_flag) -> None:
    """Raise ValueError for attributes out of the ranges of a dataclass, all by ``spell``."""
    wrong = []
    for field in dataclasses.fields(options):
        allowed, value = field.metadata.get("range"), getattr(values, field.name, None)
        # a text may be a choice, or an interpolation that is resolved elsewhere
        if allowed is not None and isinstance(value, (int, float)) and value not in allowed:
            wrong.append(f"{spell(field.name, value)} {allowed.objection(value)}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _in_backticks(name: str, value: Any = None) -> str:
    return f"`{name}`" if value is None else f"`{name}={value!r}`"


def check_needs(values: Any, options: type, spell: Callable[..., str] = _in_backticks) -> None:
    """Raise OptionError for an option that is not at its default, but lacks what it needs.

    ``values`` may lack options of the dataclass. ``spell`` writes a name, with or without a value.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}

    def is_met(need: str) -> bool:
        name, _, wanted = need.partition("=")
        given = getattr(values, name, None)
        return str(given) == wanted if wanted else given not in (None, defaults.get(name, False))

    for field in dataclasses.fields(options):
        needs, value = field.metadata.get("needs"), getattr(values, field.name, None)
        if not needs or value in (None, field.default) or any(map(is_met, needs)):
            continue
        wanted = " or ".join(spell(*need.split("=")) for need in needs)
        raise OptionError(f"{spell(field.name, value)} needs {wanted}")


def in_range(kind: type, allowed: Range) -> Callable[[str], Any]:
    """Return a ``type=`` for argparse: an ``int`` or ``float`` (``kind``) in the range."""

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
    """Options that contradict each other. The text names them in backticks."""

    def __init__(self, text: str):
        super().__init__(text.replace("`", ""))
        self.text = text


_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")


def with_flags(text: str, *configs: Any) -> str:
    """Return a text with the options of some dataclasses spelled as on a command line."""
    fields = [field for each in configs for field in dataclasses.fields(each)]
    flags = {each.name: flag_name(each) for each in fields if each.metadata.get("flag") != NO_FLAG}

    def spelled(argument: re.Match) -> str:
        name, value = argument.groups()
        if name not in flags:
            return argument[0].strip("`")
        return as_flag(flags[name], "" if value in (None, "True") else value.strip("'"))

    return _ARGUMENT.sub(spelled, text)
