"""This process among the ranks of the default process group, and what is made once for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch.distributed as dist

# The default process group for which the values were made, and the values. A process group of the
# values may be the default one itself, so a weak dictionary would never drop it.
_made: tuple[Any, dict[Hashable, Any]] = (None, {})


def process_world() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) where no process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def once_per_world(key: Hashable, make: Callable[[], Any]) -> Any:
    """What ``make()`` returned when the key was first used with the present default group."""
    global _made
    if _made[0] is not dist.group.WORLD:
        _made = (dist.group.WORLD, {})
    if key not in _made[1]:
        _made[1][key] = make()
    return _made[1][key]


def forget() -> None:
    """Drop the default group and all that was made for it."""
    global _made
    _made = (None, {})
