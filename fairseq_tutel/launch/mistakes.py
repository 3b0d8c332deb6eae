"""Mistakes that keep a job from starting, and who speaks of them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class SharedMistake(ValueError):
    """Every rank of the job finds it, in the same words: one of them says so."""


@contextlib.contextmanager
def shared_if(same_everywhere: bool) -> Iterator[None]:
    """A ValueError inside is a SharedMistake if what it rests on is the `same_everywhere`."""
    try:
        yield
    except ValueError as error:
        raise SharedMistake(*error.args) if same_everywhere else error from None


def is_first_rank(env: Mapping[str, str]) -> bool:
    """Whether this process should speak for all that find the same mistake."""
    return next((env[name] for name in _RANKS if env.get(name)), "0") == "0"


def message(error: ValueError, env: Mapping[str, str], several_nodes: bool) -> str:
    """What this process says: nothing of what another says as well, and which host it is on where
    the mistake may be its alone."""
    if isinstance(error, SharedMistake):
        return f"launch: error: {error}\n" if is_first_rank(env) else ""
    others = several_nodes or any(env.get(name) for name in _RANKS)
    return f"launch: error{f' on {socket.gethostname()}' if others else ''}: {error}\n"
