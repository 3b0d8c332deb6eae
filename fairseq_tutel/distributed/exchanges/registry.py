"""Exchanges by name: :data:`~fairseq_tutel.config.EXCHANGES`."""

from __future__ import annotations

from collections.abc import Callable

from ...config import EXCHANGES
from .base import Exchange


def register_exchange(name: str) -> Callable[[type[Exchange]], type[Exchange]]:
    """Class decorator that makes an exchange known by a name; also from outside the package.

    The name is then a choice of ``MoELayer(exchange=...)``, of the benchmarks, of the planner and,
    if it was registered before fairseq reads the command line, of ``--moe-a2a``; the first line of
    the class's docstring is its help.

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[Exchange]) -> type[Exchange]:
        EXCHANGES.register(name)(cls)
        cls.name = name
        return cls

    return register
