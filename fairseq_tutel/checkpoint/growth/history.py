"""History of a set's growth, stored in the set for :func:`..inspect`.

``moe_growth`` is a list of dicts, the latest last::

    {"what": "upcycle" | "grow" | "shrink", "how": text, "before": E or 0, "after": E2 or 0,
     "update": updates done then}

Entries of earlier versions have more keys, which are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..layout import CheckpointError
from ..state import GROWTH


@dataclass(frozen=True)
class Growth:
    """One entry of the history."""

    what: str
    how: str
    before: int  # E; 0: dense
    after: int
    update: int

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Growth:
        """Read an entry that a set stores; raise CheckpointError for anything else."""
        kinds = dict.fromkeys((each.name for each in fields(cls)), int)
        kinds |= {"what": str, "how": str}
        if any(type(stored.get(name)) is not kind for name, kind in kinds.items()):
            raise CheckpointError(f"{GROWTH!r} has an invalid entry: {stored!r}")
        return cls(**{name: stored[name] for name in kinds})

    def __str__(self) -> str:
        sizes = f"{self.before or 'dense'} -> {self.after or 'dense'}"
        return f"{sizes} ({self.what} after {self.update} updates: {self.how})"


def history_of(state: Mapping[str, Any]) -> list[Growth]:
    """Return the history in a set's shared state."""
    return [Growth.of(entry) for entry in state.get(GROWTH) or ()]


def updates_done(state: Mapping[str, Any]) -> int:
    """Return the number of updates of the run that saved a set; 0 if unknown."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates") or 0)
