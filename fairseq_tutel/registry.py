"""Implementations that are chosen by name, and their options. Standard library only.

A registry has every name that there is: the built-in ones, and those that a user's own file adds.
Command line, Hydra schema, planner and layer read it, so that a new implementation is one file and
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

from .ranges import Range, as_argument, check_ranges, ranges_of

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
    low, low_open = (at_least, False) if above is None else (above, True)
    allowed = Range(
        -math.inf if low is None else low, math.inf if at_most is None else at_most, low_open
    )
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    metadata = {
        "help": help,
        "choices": choices,
        "flag": flag,
        "range": allowed if is_number else None,
    }
    return dataclasses.field(default=default, metadata=metadata)


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
            choices = field.metadata["choices"]
            if choices is not None and value not in choices:
                raise ValueError(
                    f"{field.name}={value!r} is unknown; choose one of {', '.join(choices)}"
                )
        check_ranges(self, ranges_of(type(self)), as_argument)


def _of_type(field: dataclasses.Field, value: Any) -> Any:
    wanted = type(field.default)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is str:
        return str(getattr(value, "value", value))  # the host's choices may be an Enum
    if type(value) is not wanted:
        raise ValueError(f"{field.name}={value!r} must be of type {wanted.__name__}")
    return value


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
        self._classes: dict[str, Implementation] = {}
        self._listeners: list[Callable[[], None]] = []

    def register(self, name: str) -> Callable[[Implementation], Implementation]:
        """Decorator of a class.

        Raises:
            ValueError: the name, or the flag of an option, is taken.
        """

        def add(implementation: Implementation) -> Implementation:
            before = self._classes.get(name, implementation)
            if before.__qualname__ != implementation.__qualname__:
                raise ValueError(f"{self.kind} {name!r} is registered already, as {before}")
            mine = set(self._flags(name, implementation))
            for other, registered in self._classes.items():
                taken = mine & set(self._flags(other, registered))
                if taken and other != name:
                    raise ValueError(f"{self.kind} {name!r}: {taken} are options of {other!r}")
            self._classes[name] = implementation
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
        return iter(sorted(self._classes))

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
        return self._classes[name]

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
        names = [field.name for field in dataclasses.fields(wanted)]
        for key in given or ():
            if key not in names:
                raise ValueError(
                    f"{self.kind}={name!r} has no option {key!r}; "
                    f"it has {', '.join(names) or 'none'}"
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
