"""What growth did to a set, stored in it, and how far new experts have come in.

``moe_growth`` is a list of dicts, the latest last::

    {"what": "upcycle" | "grow" | "shrink", "how": a text, "before": E, "after": E2, or 0: dense,
     "update": updates done then, "ramp": N, "held": {layer: [numbers of the new experts]}}

After ``grow --exact`` (``ramp`` N > 0) the selection of a held expert gets a bias that keeps it out
of the K best, and that comes in over N updates: ``-(1000^left - 1)`` with ``left`` going from 1 to
0 (:func:`held_back_by`). Logits a thousand apart are no logits of a softmax that trains; the ramp
is exponential since it is not known how far apart they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..layout import CheckpointError
from ..state import GROWTH


@dataclass(frozen=True)
class Growth:
    """An entry of the history."""

    what: str
    how: str
    before: int  # E, 0 of a dense model
    after: int
    update: int
    ramp: int = 0  # updates over which held experts come in; 0: none is held
    held: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Growth:
        """Of what :meth:`stored` made; raises CheckpointError for anything else."""
        kinds = dict.fromkeys((each.name for each in fields(cls)), int)
        kinds |= {"what": str, "how": str, "held": dict}
        if {name: type(value) for name, value in stored.items()} != kinds:
            raise CheckpointError(f"{GROWTH!r} has an entry that is none: {stored!r}")
        return cls(**stored)

    def stored(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "held": {name: list(held) for name, held in self.held.items()}}

    def counted_from(self, update: int) -> Growth:
        """The same in a run that counts its updates anew."""
        return replace(self, update=update)

    def left(self, update: int) -> float:
        """How much of the ramp is left after an update, 1 to 0."""
        if not self.ramp:
            return 0.0
        return min(max(1 - (update - self.update) / self.ramp, 0.0), 1.0)

    def __str__(self) -> str:
        sizes = f"{self.before or 'dense'} -> {self.after or 'dense'}"
        ramp = f", held back over {self.ramp} updates" if self.ramp else ""
        return f"{sizes} ({self.what} after {self.update} updates: {self.how}{ramp})"


def history_of(state: Mapping[str, Any]) -> list[Growth]:
    """What was done to a set, by its shared state."""
    return [Growth.of(entry) for entry in state.get(GROWTH) or ()]


def updates_done(state: Mapping[str, Any]) -> int:
    """Updates of the run that saved a set; 0 where that is not stored."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates") or 0)


def refuse_while_held(state: Mapping[str, Any], path: str) -> None:
    """Raises CheckpointError where the experts of an earlier growth have not come in yet: their
    numbers would change under way.
    """
    done = updates_done(state)
    for entry in history_of(state):
        if entry.left(done) > 0:
            raise CheckpointError(
                f"{path}: after {done} updates its last growth is under way, until update "
                f"{entry.update + entry.ramp}: train on until then"
            )


def with_entry(state: Mapping[str, Any], entry: Growth) -> list[dict[str, Any]]:
    """The history with one more entry; the ramps before it are over."""
    earlier = [{**each.stored(), "ramp": 0, "held": {}} for each in history_of(state)]
    return [*earlier, entry.stored()]


def held_back(history: Sequence[Growth], update: int, num_outputs: int) -> dict[str, Tensor] | None:
    """By layer, fp32 [E + N]: the bias of each held expert after an update, nan of the others.

    None where no expert is held, nor came in with this very update.
    """
    last = history[-1] if history else None
    if last is None or not last.ramp or update > last.update + last.ramp:
        return None
    found = {}
    for layer, numbers in last.held.items():
        found[layer] = torch.full((num_outputs,), torch.nan)
        found[layer][list(numbers)] = held_back_by(last.left(update))
    return found


def held_back_by(left: float) -> float:
    """The bias of a held expert with so much left of its ramp, 1 to 0: ``-(1000^left - 1)``, so
    that most of the ramp is where logits differ.
    """
    return 1.0 - 1000.0**left
