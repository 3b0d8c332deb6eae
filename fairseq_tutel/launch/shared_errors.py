"""Errors that several ranks of a job find before it starts, and which of them reports one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class SharedError(ValueError):
    """Every rank of the job finds it, in the same words: one of them reports it."""


@contextlib.contextmanager
def shared_if(same_everywhere: bool) -> Iterator[None]:
    """Raises a ValueError inside as a SharedError if all ranks check the same values."""
    try:
        yield
    except ValueError as error:
        raise SharedError(*error.args) if same_everywhere else error from None


def is_first_rank(env: Mapping[str, str]) -> bool:
    """Whether this process is the one to report an error that all ranks find."""
    return next((env[name] for name in _RANKS if env.get(name)), "0") == "0"


def message(error: ValueError, env: Mapping[str, str], several_nodes: bool) -> str:
    """The line that this process prints: "" where another rank prints it, with the host's name
    where the error may be this host's alone."""
    if isinstance(error, SharedError):
        return f"launch: error: {error}\n" if is_first_rank(env) else ""
    others = several_nodes or any(env.get(name) for name in _RANKS)
    return f"launch: error{f' on {socket.gethostname()}' if others else ''}: {error}\n"
