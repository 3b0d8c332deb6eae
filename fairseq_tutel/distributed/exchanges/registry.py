"""Exchanges by name."""

from __future__ import annotations

from collections.abc import Callable

from .base import Exchange

_EXCHANGES: dict[str, type[Exchange]] = {}
_listeners: list[Callable[[], None]] = []


def register_exchange(name: str) -> Callable[[type[Exchange]], type[Exchange]]:
    """Class decorator that makes an exchange known by a name; also from outside the package.

    The name is then a choice of ``MoELayer(exchange=...)``, of the benchmarks, of the planner and,
    if it was registered before fairseq reads the command line, of ``--moe-a2a``.

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[Exchange]) -> type[Exchange]:
        if name in _EXCHANGES:
            raise ValueError(f"exchange {name!r} is registered already ({_EXCHANGES[name]})")
        cls.name = name
        _EXCHANGES[name] = cls
        for listener in _listeners:
            listener()
        return cls

    return register


def on_new_exchange(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever a class is registered from now on."""
    _listeners.append(listener)


def exchange_names() -> tuple[str, ...]:
    """All registered names, in the order of registration."""
    return tuple(_EXCHANGES)


def exchange_class(name: str) -> type[Exchange]:
    """The class of a name.

    Raises:
        ValueError: nothing is registered under it; the message lists what is.
    """
    if name not in _EXCHANGES:
        raise ValueError(f"exchange {name!r} is unknown; choose one of {', '.join(_EXCHANGES)}")
    return _EXCHANGES[name]


def exchange_help() -> str:
    """``name: summary; ...`` of all, for an option's help text."""
    return "; ".join(f"'{name}': {cls.summary}" for name, cls in _EXCHANGES.items())
