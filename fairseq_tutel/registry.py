"""Implementations that are chosen by name, and their options. Standard library only.

A registry knows every name that there is: the built-in ones, and those that a user's own file adds.
Command line, Hydra schema, planner and layer ask it, so that a new implementation is one file and
an unknown name is refused everywhere, with the list of what there is.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Implementation = TypeVar("Implementation", bound=type)


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
) -> Any:
    """A field of :class:`Options`.

    Args:
        default: an int, float, bool or str; the type of the option is its own.
        help: one line, for the command line.
        at_least, at_most, above: limits of a number; it has to be finite in any case.
        choices: of a text.
        flag: on the command line; by default made of the names of implementation and field.
    """
    limits = {"at_least": at_least, "at_most": at_most, "above": above}
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "flag": flag, **limits}
    )


@dataclass(frozen=True)
class Options:
    """Options of one implementation: a frozen dataclass whose fields :func:`option` makes.

    Raises:
        ValueError: a value of another type than the default's, or out of its range.
    """

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = _of_type(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check_range(field, value)


def _of_type(field: dataclasses.Field, value: Any) -> Any:
    wanted = type(field.default)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is str:
        return str(getattr(value, "value", value))  # the host's choices may be an Enum
    if type(value) is not wanted:
        raise ValueError(f"{field.name}={value!r} must be of type {wanted.__name__}")
    return value


def _check_range(field: dataclasses.Field, value: Any) -> None:
    limits = field.metadata
    if limits["choices"] is not None and value not in limits["choices"]:
        raise ValueError(
            f"{field.name}={value!r} is unknown; choose one of {', '.join(limits['choices'])}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field.name}={value} must be a finite number")
    for name, words, holds in (
        ("at_least", "at least", lambda limit: value >= limit),
        ("at_most", "at most", lambda limit: value <= limit),
        ("above", "more than", lambda limit: value > limit),
    ):
        if limits[name] is not None and not holds(limits[name]):
            raise ValueError(f"{field.name}={value} must be {words} {limits[name]}")


class Registry(Generic[Implementation]):
    """Classes by name; each has an attribute ``Options``, a subclass of :class:`Options`.

    Args:
        kind: what is registered, for errors; the name of the option that chooses one.
        home: module that registers the built-in ones; imported when the first name is looked up.
        flag_prefix: beginning of the options' flags on the command line.
    """

    def __init__(self, kind: str, home: str, flag_prefix: str):
        self.kind = kind
        self._home = home
        self._flag_prefix = flag_prefix
        self._known: dict[str, Implementation] = {}
        self._listeners: list[Callable[[], None]] = []

    def register(self, name: str) -> Callable[[Implementation], Implementation]:
        """Decorator of a class.

        Raises:
            ValueError: the name, or the flag of an option, is taken.
        """

        def add(implementation: Implementation) -> Implementation:
            before = self._known.get(name, implementation)
            if before.__qualname__ != implementation.__qualname__:
                raise ValueError(f"{self.kind} {name!r} is registered already, as {before}")
            mine = set(self._flags(name, implementation))
            for other, known in self._known.items():
                taken = mine & set(self._flags(other, known))
                if taken and other != name:
                    raise ValueError(f"{self.kind} {name!r}: {taken} are options of {other!r}")
            self._known[name] = implementation
            for listener in self._listeners:
                listener()
            return implementation

        return add

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` now, and whenever a class is registered from now on."""
        importlib.import_module(self._home)
        self._listeners.append(listener)
        listener()

    def __iter__(self) -> Iterator[str]:
        importlib.import_module(self._home)
        return iter(sorted(self._known))

    def get(self, name: str) -> Implementation:
        """The class of this name.

        Raises:
            ValueError: there is none; the message lists what there is.
        """
        names = list(self)
        if name not in names:
            raise ValueError(
                f"{self.kind}={name!r} is unknown; choose one of {', '.join(names)} "
                "(others are known once the file that registers them has been imported)"
            )
        return self._known[name]

    def summary(self, name: str) -> str:
        """First line of the docstring of a class, for help texts."""
        return (inspect.getdoc(self.get(name)) or "").split("\n")[0].rstrip(".")

    def options(self, name: str, given: Options | Mapping[str, Any] | None = None) -> Options:
        """The options of an implementation.

        Args:
            given: by name, or an object that is checked to be of the right class; None: defaults.

        Raises:
            ValueError: an unknown name, option or value, or options of another implementation.
        """
        wanted = self.get(name).Options
        if type(given) is wanted:
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{given!r} are no options of {self.kind}={name!r}")
        known = [field.name for field in dataclasses.fields(wanted)]
        for key in given or ():
            if key not in known:
                raise ValueError(
                    f"{self.kind}={name!r} has no option {key!r}; "
                    f"it has {', '.join(known) or 'none'}"
                )
        try:
            return wanted(**(given or {}))
        except ValueError as error:
            raise ValueError(f"{self.kind} {name}: {error}") from None

    def flags(self, name: str) -> dict[str, dataclasses.Field]:
        """Name of a command line's option, as of a variable -> the field of ``Options``."""
        return self._flags(name, self.get(name))

    def all_flags(self) -> dict[str, dataclasses.Field]:
        """:meth:`flags` of every implementation."""
        return {flag: field for name in self for flag, field in self.flags(name).items()}

    def _flags(self, name, implementation):
        return {
            (
                (field.metadata["flag"] or f"{self._flag_prefix}_{name}_{field.name}")
                .lstrip("-")
                .replace("-", "_")
            ): field
            for field in dataclasses.fields(implementation.Options)
        }

    def options_of_flags(self, name: str, values: Any) -> Options:
        """The options of an implementation from the attributes of a host's config.

        Args:
            values: has an attribute for each flag of every implementation.

        Raises:
            ValueError: see :meth:`options`; or an option of another implementation is set.
        """
        mine = self.flags(name)
        for flag, field in self.all_flags().items():
            if flag not in mine and getattr(values, flag) != field.default:
                raise ValueError(
                    f"--{flag.replace('_', '-')} {getattr(values, flag)} is an option of another "
                    f"{self.kind} than {name}, which was chosen"
                )
        return self.options(name, {f.name: getattr(values, flag) for flag, f in mine.items()})
