"""Figure of bench_flows.py: memory by placement, and steps by r, with and without switching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import figures

_PARTS = {"weights": "#1d4ed8", "gradients": "#4b8f8c", "statistics": "#b0b7c3"}
_ORDERS = {"never": "#b0b7c3", "every step": "#1d4ed8"}


def draw(pyplot, result: dict[str, Any], path: Path) -> None:
    """Draw one result as a PNG file."""
    figure, (memory, steps) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    _memory(memory, result["memory"])
    _steps(steps, result["switching"])
    for axis in (memory, steps):
        axis.grid(axis="y", color="#d9dde3", linewidth=0.8)
        axis.set_axisbelow(True)
    figure.suptitle(
        f"Experts in slices: {result['world_size']} ranks, {result['backend']}\n"
        f"{figures.caption(result)}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figures.save(pyplot, figure, path)


def _memory(axis, rows) -> None:
    names = [
        row["placement"] if row["slices"] == 1 else f"{row['placement']}\n{row['slices']} slices"
        for row in rows
    ]
    below = [0.0] * len(rows)
    for part, color in _PARTS.items():
        values = [row[part] / 2**20 for row in rows]
        axis.bar(names, values, 0.5, bottom=below, color=color, label=part)
        below = [a + b for a, b in zip(below, values, strict=True)]
    grown = [row["resident_growth"] / 2**20 for row in rows]
    axis.plot(names, grown, "k_", ms=40, label="growth of the resident set")
    axis.set_ylabel("MiB of a rank")
    axis.legend(frameon=False, fontsize=8, markerscale=0.4)


def _steps(axis, switching) -> None:
    names = [str(r) for r in switching["r"]]
    for offset, (order, color) in enumerate(_ORDERS.items()):
        times = switching["by_r"][order]
        places = [i + (offset - 0.5) * 0.4 for i in range(len(names))]
        values = [1e3 * times[name] for name in names]
        axis.bar(places, values, 0.4, color=color, label=f"r changes: {order}")
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel("r")
    axis.set_ylabel("ms per step, slowest rank")
    axis.set_title(f"every step / never: {switching['ratio']:.3f}")
    axis.legend(frameon=False, fontsize=8)
