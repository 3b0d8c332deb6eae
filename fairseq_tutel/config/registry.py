"""Implementations by name: routers, exchanges and networks of experts. Each is one file."""

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
    """Classes by name, each with a dataclass ``Options``; the option ``kind`` chooses one."""

    def __init__(self, kind: str):
        self.kind = kind
        self._classes: dict[str, type] = {}
        self._listeners: list[Callable[[], None]] = []

    def register(self, name: str) -> Callable[[type], type]:
        """Return a decorator that registers a class; ValueError if its name or a flag is taken."""

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
        """Call ``listener`` after each registration from now on."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def get(self, name: str) -> Any:
        """Return the class of this name; raise ValueError with the known names."""
        if name in self._classes:
            return self._classes[name]
        why = "none is known before fairseq_tutel.moe is imported"  # this room imports none above
        if self._classes:
            why = f"choose one of {', '.join(self)}; {self.how_to_add()}"
        raise ValueError(f"{self.kind}={name!r} is unknown; {why}")

    def how_to_add(self) -> str:
        """Return the end of an error text: how a user's own class becomes known."""
        return (
            "one of your own is known once its file is imported: with fairseq, a folder my_plugin "
            f"whose __init__.py says `import fairseq_tutel`, `from . import my_{self.kind}` and "
            "`fairseq_tutel.register()`, and --user-dir my_plugin"
        )

    def summary(self, name: str) -> str:
        """Return the first line of a class's docstring, for help texts."""
        return (inspect.getdoc(self.get(name)) or "").split("\n")[0].rstrip(".")

    def options(self, name: str, given: Options | Mapping[str, Any] | None = None) -> Options:
        """Return the ``Options`` of a class; ValueError for an unknown name, option or value.

        ``given`` are values by name, or the object itself; None: all defaults.
        """
        wanted = self.get(name).Options
        if isinstance(given, Options) and type(given) is wanted:
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

    def flags(self, name: str | None = None) -> dict[str, dataclasses.Field]:
        """Return the fields of one or all ``Options`` by flag, as ``moe_cosine_bias``."""
        names = self if name is None else [name]
        return {
            flag: field for each in names for flag, field in _flags(each, self.get(each)).items()
        }

    def options_of_flags(self, name: str, values: Any) -> Options:
        """Return :meth:`options` from attributes named as flags; ValueError for another class's."""
        mine, given = self.flags(name), {}
        for flag, field in self.flags().items():
            value = getattr(values, flag, field.default)
            if flag in mine:
                given[field.name] = value
            elif value != field.default:
                given = as_flag(flag, value)
                raise ValueError(f"{given} is an option of another {self.kind} than {name}")
        return self.options(name, given)


def _flags(name: str, implementation: Any) -> dict[str, dataclasses.Field]:
    fields = dataclasses.fields(implementation.Options)
    return {flag_name(field, f"moe_{name}"): field for field in fields}


# The packages moe.routers, distributed.exchanges and moe.experts fill these.
ROUTERS = Registry("router")
EXCHANGES = Registry("exchange")
EXPERTS = Registry("expert_network")
