"""Counts of the routing inside fairseq's logging outputs, which sum over batches and ranks.

fairseq adds up logging outputs, by one all-reduce over the ranks. Utilisation is that of a forward
pass of all ranks, so the passes of an update are kept apart: before that sum, a rank's logging
outputs are joined into one whose counts have one row per pass (:func:`join_passes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..moe import UTILISATION_NAMES, RoutingCounts, utilisation

_KEYS = tuple(f"moe_{name}" for name in RoutingCounts._fields)


def counts_to_log(counts: RoutingCounts) -> dict[str, torch.Tensor]:
    """Entries of a logging output."""
    return dict(zip(_KEYS, counts, strict=True))


def join_passes(logs: Sequence[dict[str, Any]], fillers: int = 0) -> None:
    """Move the counts of all logs into the first one, one row per pass: [U, L, ...].

    Args:
        logs: of one rank, in the order of its passes; changed in place.
        fillers: passes before them that do not count; other ranks may have had batches then.
    """
    if not logs or _KEYS[0] not in logs[0]:
        return
    for key in _KEYS:
        rows = [log.pop(key) for log in logs]
        empty = [torch.zeros_like(rows[0])] * fillers
        logs[0][key] = torch.stack([*empty, *rows])


def logged_passes(logs: Sequence[dict[str, Any]]) -> RoutingCounts | None:
    """The counts of all passes, [U, L, ...]; None without MoE layers.

    Args:
        logs: each with the counts of one pass, or joined ones; of all ranks.
    """
    found = [RoutingCounts(*(log[key] for key in _KEYS)) for log in logs if _KEYS[0] in log]
    if not found:
        return None
    counts = RoutingCounts(*zip(*found, strict=True))
    layers, experts = counts.load[0].shape[-2:]
    shapes = {"load": (layers, experts), "kept": (layers, experts), "slots": (layers,)}
    shapes["received"] = (layers, counts.received[0].shape[-1])
    return RoutingCounts(
        **{
            name: torch.cat([part.reshape(-1, *shapes[name]) for part in parts])
            for name, parts in counts._asdict().items()
        }
    )


def utilisation_to_log(passes: RoutingCounts) -> dict[str, torch.Tensor]:
    """Mean over passes and layers of every metric, and the number of ``padded_rows``."""
    means = torch.stack(utilisation(passes)).flatten(1).mean(1)
    return {**dict(zip(UTILISATION_NAMES, means, strict=True)), "padded_rows": passes.slots.sum()}
