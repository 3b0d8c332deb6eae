"""Figures of bench_exchange.py, after those of Tutel's paper (arXiv 2206.03382)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import figures

_COLORS = {"linear": "#b0b7c3", "2dh": "#c2410c", "auto": "#1d4ed8"}
LINKS = {
    "messages": "two nodes of half the ranks, rate limit and cost per message",
    "bandwidth": "two nodes of half the ranks, rate limit",
    "loopback": "one machine, loopback, nothing shaped",
}


def draw(pyplot, result: dict[str, Any], path: Path) -> None:
    """Draw one result as a PNG file."""
    {"sizes": _sizes, "overlap": _overlap, "wire": _wire}[result["part"]](pyplot, result, path)


def size_label(size: float) -> str:
    """64 KiB, 4 MiB."""
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def _title(figure, result, text: str) -> None:
    figure.suptitle(
        f"{text}: {result['world_size']} ranks, {result['backend']}, {LINKS[result['link']]}\n"
        f"{figures.caption(result)}",
        fontsize=10,
        x=0.01,
        ha="left",
    )


def _overlap(pyplot, result, path) -> None:
    """A layer's time by degree, beside its parts alone, and what is hidden (after fig. 9, 15)."""
    figure, (times, hidden) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = result["results"]
    names = [str(row["degree"]) for row in rows]
    parts = {
        "layer": ("layer, forward + backward", "#1d4ed8"),
        "exchange_alone": ("exchanges alone, as many chunks", "#c2410c"),
        "experts_alone": ("experts alone", "#4b8f8c"),
    }
    for offset, (key, (label, color)) in enumerate(parts.items()):
        places = [i + (offset - 1) * 0.27 for i in range(len(rows))]
        bars = times.bar(places, [1e3 * row[key] for row in rows], 0.27, color=color, label=label)
        if key == "layer":
            labels = [f"{row['speedup']:.2f} x" for row in rows]
            times.bar_label(bars, labels, padding=3, fontsize=9)
    times.set_xticks(range(len(rows)), names)
    times.set_ylabel("ms")
    times.set_ylim(0, 1.35 * max(1e3 * row["layer"] for row in rows))
    times.legend(frameon=False, fontsize=8, loc="upper right")
    shares = [100 * row["hidden_share"] for row in rows]
    hidden.bar_label(hidden.bar(names, shares, 0.6, color="#1d4ed8"), fmt="%.0f%%", padding=3)
    schedule = [100 * row["hidden_by_schedule"] for row in rows]
    hidden.plot(names, schedule, "k_", ms=30, label="what the schedule can hide with these parts")
    hidden.legend(frameon=False, fontsize=8, loc="upper left")
    hidden.set_ylim(min(0, *shares) * 1.2, 1.35 * max(100, *shares))
    hidden.set_ylabel("hidden share, %")
    for axis in (times, hidden):
        axis.set_xlabel("overlap degree: chunks")
        axis.grid(axis="y", color="#d9dde3", linewidth=0.8)
        axis.set_axisbelow(True)
    _title(figure, result, "One MoE layer, exchanges and experts overlapped")
    figures.save(pyplot, figure, path)


def _wire(pyplot, result, path) -> None:
    """Bytes on the link and time of a step, by format."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    rows = result["results"]
    names = [row["wire"] for row in rows]
    sent = [row["link_bytes"] / 2**20 for row in rows]
    times = [1e3 * row["seconds"] for row in rows]
    columns = (
        (sent, "MiB on the link per step, one way", [f"{row['bytes_share']:.3f}" for row in rows]),
        (times, "ms per step", [f"{row['speedup']:.2f} x" for row in rows]),
    )
    for axis, (values, label, texts) in zip(axes, columns, strict=True):
        axis.bar_label(axis.bar(names, values, 0.6, color="#1d4ed8"), texts, padding=3)
        axis.set_ylim(0, 1.15 * max(values))
        axis.set_ylabel(label)
        axis.grid(axis="y", color="#d9dde3", linewidth=0.8)
        axis.set_axisbelow(True)
    _title(figure, result, "fp32 rows on the wire, four legs")
    figures.save(pyplot, figure, path)


def _sizes(pyplot, result, path) -> None:
    """Time by size, and the factor that 2dh gains (the paper's fig. 16 to 18)."""
    figure, (times, gain) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    sizes = [int(size) for size in result["ratios"]]
    for algorithm in result["settings"]["algorithms"]:
        rows = [row for row in result["results"] if row["algorithm"] == algorithm]
        x = [row["bytes"] for row in rows]
        color = _COLORS.get(algorithm, "#4b8f8c")
        times.plot(
            x,
            [1e3 * row["seconds"]["p50"] for row in rows],
            "o-",
            color=color,
            ms=4,
            label=algorithm,
        )
        times.fill_between(
            x,
            [1e3 * row["seconds"]["p20"] for row in rows],
            [1e3 * row["seconds"]["p80"] for row in rows],
            color=color,
            alpha=0.2,
        )
    times.set_yscale("log")
    times.set_ylabel("ms of one exchange (line: median, band: p20 to p80)")
    times.legend(frameon=False)
    factors = [result["ratios"][str(size)].get("linear/2dh", 0.0) for size in sizes]
    bars = gain.bar([str(i) for i in range(len(sizes))], factors, color=_COLORS["2dh"], width=0.6)
    gain.bar_label(bars, fmt="%.2f", padding=3)
    gain.axhline(1, color="black", linewidth=0.8)
    gain.set_ylim(0, 1.2 * max(*factors, 1))
    gain.set_ylabel("times faster than linear: 2dh")
    gain.set_xticks(range(len(sizes)), [size_label(size) for size in sizes])
    times.set_xscale("log", base=2)
    times.set_xticks(sizes, [size_label(size) for size in sizes])
    for axis in (times, gain):
        axis.tick_params(axis="x", labelsize=8)
        axis.set_xlabel("bytes per rank")
        axis.grid(axis="y", color="#d9dde3", linewidth=0.8)
        axis.set_axisbelow(True)
    _title(figure, result, "Linear and hierarchical all-to-all")
    figures.save(pyplot, figure, path)
