"""Implementations that are chosen by name, and their options. Standard library only.

Built-in ones, and those that a user's own file adds. Command line, Hydra schema, planner and layer
read a registry, so that a new implementation is one file.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .options import as_flag, check_options, flag_name


@dataclass(frozen=True)
class Options:
    """Options of one implementation: a frozen dataclass whose fields ``option`` makes."""

    def __post_init__(self):
        check_options(self)


class Registry:
    """Classes by name, each with an ``Options``; ``kind`` names the option that chooses one."""

    def __init__(self, kind: str):
        self.kind = kind
        self._classes: dict[str, type] = {}
        self._listeners: list[Callable[[], None]] = []

    def register(self, name: str) -> Callable[[type], type]:
        """Decorator of a class; ValueError: the name, or the flag of an option, is taken."""

        def add(implementation: type) -> type:
            before = self._classes.get(name, implementation)
            if before.__qualname__ != implementation.__qualname__:
                raise ValueError(f"{self.kind} {name!r} is registered already, as {before}")
            mine = _flags(name, implementation)
            for other in self._classes:
                taken = set(mine) & set(self.flags(other))
                if taken and other != name:
                    raise ValueError(f"{self.kind} {name!r}: {taken} are options of {other!r}")
            self._classes[name] = implementation
            for listener in self._listeners:
                listener()
            return implementation

        return add

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` now, and whenever a class is registered from now on."""
        self._listeners.append(listener)
        listener()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def get(self, name: str) -> Any:
        """The class of this name; ValueError lists what there is."""
        if name in self._classes:
            return self._classes[name]
        why = "none is known before fairseq_tutel.moe is imported"  # this room imports none above
        if self._classes:
            why = f"choose one of {', '.join(self)}; {self.how_to_add()}"
        raise ValueError(f"{self.kind}={name!r} is unknown; {why}")

    def how_to_add(self) -> str:
        """For errors."""
        return (
            "one of your own is known once its file is imported: with fairseq, a folder my_plugin "
            f"whose __init__.py says `import fairseq_tutel`, `from . import my_{self.kind}` and "
            "`fairseq_tutel.register()`, and --user-dir my_plugin"
        )

    def summary(self, name: str) -> str:
        """First line of the docstring of a class, for help texts."""
        return (inspect.getdoc(self.get(name)) or "").split("\n")[0].rstrip(".")

    def options(self, name: str, given: Options | Mapping[str, Any] | None = None) -> Options:
        """The options of an implementation, given by name or as one object; None: defaults. Raises
        ValueError for an unknown name, option or value, and options of another implementation.
        """
        wanted = self.get(name).Options
        if type(given) is wanted:
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{given!r} are no options of {self.kind}={name!r}")
        names = [field.name for field in dataclasses.fields(wanted)]
        for key in given or ():
            if key not in names:
                has = ", ".join(names) or "none"
                raise ValueError(f"{self.kind}={name!r} has no option {key!r}; it has {has}")
        try:
            return wanted(**(given or {}))
        except ValueError as error:
            raise ValueError(f"{self.kind} {name}: {error}") from None

    def flags(self, name: str) -> dict[str, dataclasses.Field]:
        """Name of a command line's option, as of a variable -> the field of ``Options``."""
        return _flags(name, self.get(name))

    def all_flags(self) -> dict[str, dataclasses.Field]:
        """:meth:`flags` of every implementation."""
        return {flag: field for name in self for flag, field in self.flags(name).items()}

    def options_of_flags(self, name: str, values: Any) -> Options:
        """:meth:`options` from a host's config, which has an attribute for every flag. Raises
        ValueError also where an option of another implementation is set.
        """
        mine = self.flags(name)
        for flag, field in self.all_flags().items():
            value = getattr(values, flag)
            if flag not in mine and value != field.default:
                raise ValueError(
                    f"{as_flag(flag, value)} is an option of another {self.kind} than {name}, "
                    "which was chosen"
                )
        return self.options(name, {f.name: getattr(values, flag) for flag, f in mine.items()})


def _flags(name, implementation):
    fields = dataclasses.fields(implementation.Options)
    return {flag_name(field, f"moe_{name}"): field for field in fields}


# They register themselves, see the packages moe.routers, distributed.exchanges and moe.experts.
ROUTERS = Registry("router")
EXCHANGES = Registry("exchange")
EXPERTS = Registry("expert_network")
