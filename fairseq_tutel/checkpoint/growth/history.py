"""History of a set's growth, stored in the set, and the bias of experts that are held back.

``moe_growth`` is a list of dicts, the latest last::

    {"what": "upcycle" | "grow" | "shrink", "how": text, "before": E or 0, "after": E2 or 0,
     "update": updates done then, "ramp": N, "held": {layer: [numbers of the new experts]}}

After ``grow --exact`` (N > 0) the load bias of each new expert starts so low that the expert is
never among the K best: the logits of a trained softmax are never a thousand apart. The bias rises
to 0 over N updates as ``-(1000^left - 1)``, exponentially, because their spread is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

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
    ramp: int = 0  # updates over which held back experts come in; 0: none are held back
    held: dict[str, list[int]] = field(default_factory=dict)  # layer -> numbers of new experts

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Growth:
        """Read an entry that a set stores; raise CheckpointError for anything else."""
        kinds = dict.fromkeys((each.name for each in fields(cls)), int)
        kinds |= {"what": str, "how": str, "held": dict}
        if {name: type(value) for name, value in stored.items()} != kinds:
            raise CheckpointError(f"{GROWTH!r} has an invalid entry: {stored!r}")
        return cls(**stored)

    def left(self, update: int) -> float:
        """Return the share of the ramp that is left after an update, 1 to 0."""
        if not self.ramp:
            return 0.0
        return min(max(1 - (update - self.update) / self.ramp, 0.0), 1.0)

    def __str__(self) -> str:
        sizes = f"{self.before or 'dense'} -> {self.after or 'dense'}"
        ramp = f", held back over {self.ramp} updates" if self.ramp else ""
        return f"{sizes} ({self.what} after {self.update} updates: {self.how}{ramp})"


def history_of(state: Mapping[str, Any]) -> list[Growth]:
    """Return the history in a set's shared state."""
    return [Growth.of(entry) for entry in state.get(GROWTH) or ()]


def updates_done(state: Mapping[str, Any]) -> int:
    """Return the number of updates of the run that saved a set; 0 if unknown."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates") or 0)


def held_back(history: Sequence[Growth], update: int, num_outputs: int) -> dict[str, Tensor] | None:
    """Return the biases of held back experts after an update: layer -> fp32 [E + N], nan: none.

    Return None if no expert is held back and none came in with this update.
    """
    last = history[-1] if history else None
    if last is None or not last.ramp or update > last.update + last.ramp:
        return None
    unheld, bias = torch.full((num_outputs,), torch.nan), held_back_by(last.left(update))
    return {
        layer: unheld.index_fill(0, torch.tensor(numbers), bias)
        for layer, numbers in last.held.items()
    }


def held_back_by(left: float) -> float:
    """Return the bias of a held back expert, with ``left`` of its ramp from 1 to 0."""
    return 1.0 - 1000.0**left
