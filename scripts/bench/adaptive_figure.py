"""Figure of bench_adaptive.py: steps of a changing workload, and what they add up to."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import exchange_figures
import figures

_TUNER, _BEST, _FIXED = "#1d4ed8", "#c2410c", "#b0b7c3"


def draw(pyplot, result: dict[str, Any], path: Path) -> None:
    """Draw one result as a PNG file."""
    figure, (steps, totals) = pyplot.subplots(
        1, 2, figsize=(12, 4.6), width_ratios=[3, 2], layout="constrained"
    )
    _steps(steps, result)
    _totals(totals, result)
    figure.suptitle(
        f"Capacity factor that changes: {result['world_size']} ranks, {result['backend']}, "
        f"{exchange_figures.LINKS[result['link']]}\n{figures.caption(result)}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figures.save(pyplot, figure, path)


def _steps(axis, result) -> None:
    tuned, each = result["tuned"], result["settings"]["steps"]
    for key, label, color in (("best", "best in hindsight", _BEST), ("tuner", "tuner", _TUNER)):
        axis.plot([1e3 * s for s in tuned[key]], color=color, linewidth=0.9, label=label)
    usual = statistics.quantiles(tuned["tuner"], n=50)[-1]
    axis.set_ylim(0, 1.35e3 * usual)
    for number, row in enumerate(result["phases"]):
        axis.axvline(number * each, color="black", linewidth=0.6)
        text = f"f = {row['capacity_factor']:g}\n{row['choice']}"
        axis.text((number + 0.5) * each, 1.33e3 * usual, text, ha="center", va="top", fontsize=8)
    axis.set_xlabel("step")
    axis.set_ylabel("ms per step, slowest rank")
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _totals(axis, result) -> None:
    totals = dict(sorted(result["fixed_totals"].items(), key=lambda item: item[1]))
    names = list(totals)
    shown = names if len(names) <= 12 else [*names[:6], *names[-5:]]
    bars = {"best in hindsight": result["total"]["best"], "tuner": result["total"]["tuner"]}
    bars |= {name: totals[name] for name in shown}
    colors = itertools.chain([_BEST, _TUNER], itertools.repeat(_FIXED))
    drawn = axis.barh(list(bars), list(bars.values()), color=[next(colors) for _ in bars])
    axis.bar_label(drawn, fmt="%.1f", padding=3, fontsize=8)
    axis.set_xlim(0, 1.15 * max(bars.values()))
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    left_out = len(names) - len(shown)
    without = f", {left_out} left out" if left_out else ""
    axis.set_xlabel(f"seconds of all phases (grey: one choice{without})")
