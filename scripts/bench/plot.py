"""The three figures of Tutel's announcement, drawn from result files of these benchmarks.

    python scripts/bench/plot.py scripts/bench/results/*.json --out runs/figures

single_layer.png: speed-up of one MoE layer over the dense formulation, by GPUs. alltoall.png:
bandwidth by message size. end_to_end.png: tokens/s and speed-up of training, by GPUs. What was
measured stands on the left, what others published on the right, in panels of their own: the two
come from different hardware and are not to be compared bar by bar.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
from presets import LAYER_BACKENDS
from record import device_name, quiet_logs, say

_ANNOUNCEMENT = "Tutel's announcement (Microsoft Research blog, Nov 2021), A100"
_PAPER = "Tutel's paper (arXiv 2206.03382, fig. 14), A100"
# GPUs -> speed-up over fairseq
PUBLISHED_LAYER = {_ANNOUNCEMENT: {8: 8.49, 512: 2.75}, _PAPER: {16: 4.96, 128: 3.11, 2048: 5.75}}
PUBLISHED_TRAINING = {_ANNOUNCEMENT: {8: 2.31, 512: 1.40}}
# least and most gain by binding and adaptive routing, 512 GPUs, hundreds of MiB
PUBLISHED_ALLTOALL = (2.56, 5.93)
_PUBLISHED_COLORS = ("#7c3aed", "#a78bfa")
_NOT_MEASURED = "not measured"


def load(paths: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Results by benchmark.

    Raises:
        ValueError: a file that is no result of these benchmarks.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            results.setdefault(result["benchmark"], []).append(result)
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of these benchmarks: {error!r}") from None
    return results


def gpus(result: dict[str, Any]) -> tuple[int, bool]:
    """Ranks of a result, and whether they were simulated."""
    simulated = result["settings"].get("simulated_ranks") or 0
    return (simulated, True) if simulated > 1 else (result["world_size"], False)


def _label(result: dict[str, Any]) -> str:
    ranks, simulated = gpus(result)
    unit = "GPU" if "gpu" in result["hardware"] else "CPU rank"
    name, sizes = result["preset"], result["settings"]
    if "hidden_dim" in sizes:
        shape = f"{sizes['model_dim']}/{sizes['hidden_dim']}, {sizes['experts']} experts"
        name = shape if name == "custom" else f"{name}: {shape}"  # custom: a rung of the ladder
    if simulated:
        return f"{name}\nSIMULATED rank of {ranks}"
    return f"{name}\n{ranks} {unit}{'s'[: ranks != 1]}"


def layer_speedups(results: Sequence[dict]) -> list[dict[str, Any]]:
    """One bar per result that has both the layer and the dense formulation."""
    bars = []
    for result in results:
        cases = result["results"]
        layer = next((name for name in LAYER_BACKENDS if name in cases), None)
        if layer is None or "dense" not in cases:
            continue
        ranks, simulated = gpus(result)
        bars.append(
            {
                "label": _label(result),
                "speedup": cases["dense"]["ms"]["both"]["p50"] / cases[layer]["ms"]["both"]["p50"],
                "ranks": ranks,
                "simulated": simulated,
                "device": device_name(result),
            }
        )
    return sorted(bars, key=lambda bar: bar["ranks"])


def training_bars(results: Sequence[dict]) -> list[dict[str, Any]]:
    """One group of bars per result of bench_train: tokens/s of one rank, real or simulated."""
    groups = []
    for result in results:
        ranks, simulated = gpus(result)
        groups.append(
            {
                "label": _label(result),
                "speeds": {
                    name: run["tokens_per_second"]["p50"] / result["world_size"]
                    for name, run in result["results"].items()
                },
                "ranks": ranks,
                "simulated": simulated,
                "device": device_name(result),
            }
        )
    return sorted(groups, key=lambda group: group["ranks"])


def _panels(pyplot, title: str):
    figure, (measured, published) = pyplot.subplots(
        1, 2, figsize=(12, 4.6), width_ratios=[3, 2], layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    measured.set_title("Measured with this project")
    published.set_title("PUBLISHED by others, other hardware")
    published.set_facecolor("#f6f3fb")
    for axis in (measured, published):
        axis.grid(axis="y", color="#d9dde3", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, measured, published


def _devices(axis, entries: Sequence[dict]) -> None:
    devices = sorted({entry["device"] for entry in entries})
    axis.set_xlabel("; ".join(devices), fontsize=9)


def _nothing(axis) -> None:
    axis.text(
        0.5, 0.5, _NOT_MEASURED, transform=axis.transAxes, ha="center", fontsize=14, color="#777777"
    )
    axis.set_xticks([])
    axis.set_yticks([])


def _published_points(axis, published: dict[str, dict[int, float]]) -> None:
    for (source, points), color in zip(published.items(), _PUBLISHED_COLORS, strict=False):
        axis.plot(list(points), list(points.values()), "o--", color=color, label=source)
        for count, factor in points.items():
            axis.annotate(
                f"{factor:.2f}",
                (count, factor),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    counts = sorted({count for points in published.values() for count in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("GPUs")
    axis.set_ylabel("times faster than fairseq")
    axis.set_ylim(0, 1.3 * max(max(points.values()) for points in published.values()))
    axis.margins(x=0.12)
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def draw_layer(pyplot, results: Sequence[dict], path: Path) -> None:
    """Speed-up of a single layer."""
    figure, measured, published = _panels(
        pyplot, "A single MoE layer, forward + backward, against the dense S x E x C formulation"
    )
    bars = layer_speedups(results)
    if bars:
        drawn = measured.bar(
            range(len(bars)),
            [bar["speedup"] for bar in bars],
            width=0.6,
            color=["white" if bar["simulated"] else figures.COLORS["torch"] for bar in bars],
            edgecolor=figures.COLORS["torch"],
            hatch=["//" if b["simulated"] else "" for b in bars],
        )
        measured.bar_label(drawn, fmt="%.2f", padding=3)
        measured.set_xticks(range(len(bars)), [bar["label"] for bar in bars], fontsize=8)
        measured.set_ylabel("times faster than the dense formulation")
        measured.axhline(1, color="black", linewidth=0.8)
        measured.set_ylim(0, 1.15 * max(bar["speedup"] for bar in bars))
        _devices(measured, bars)
    else:
        _nothing(measured)
    _published_points(published, PUBLISHED_LAYER)
    figures.save(pyplot, figure, path)


def draw_alltoall(pyplot, results: Sequence[dict], path: Path) -> None:
    """Bandwidth by message size."""
    figure, measured, published = _panels(pyplot, "All-to-all by message size")
    if results:
        figures.bandwidth_lines(measured, sorted(results, key=lambda r: r["world_size"]))
        backends = {f"{device_name(r)}, {r['backend']}" for r in results}
        measured.set_title(f"Measured with this project ({'; '.join(sorted(backends))})")
    else:
        _nothing(measured)
    least, most = PUBLISHED_ALLTOALL
    published.bar(
        ["512 GPUs, hundreds of MiB"],
        [most - least],
        bottom=[least],
        width=0.3,
        color=_PUBLISHED_COLORS[0],
    )
    published.annotate(
        f"{least} to {most} times", (0, most), (0, 5), textcoords="offset points", ha="center"
    )
    published.set_ylim(0, 1.2 * most)
    published.set_xlim(-1, 1)
    published.set_ylabel("bandwidth gained by CPU-GPU binding\nand adaptive routing, times")
    published.set_xlabel(_ANNOUNCEMENT, fontsize=9)
    figures.save(pyplot, figure, path)


def draw_training(pyplot, results: Sequence[dict], path: Path) -> None:
    """Tokens/s, and this plugin's speed-up over the dense formulation."""
    figure, measured, published = _panels(pyplot, "Training end to end")
    groups = training_bars(results)
    if groups:
        _training_groups(measured, groups)
    else:
        _nothing(measured)
    _published_points(published, PUBLISHED_TRAINING)
    figures.save(pyplot, figure, path)


def _training_groups(axis, groups: Sequence[dict]) -> None:
    names = ("moe", "dense", "flop-matched")
    width = 0.8 / len(names)
    about = {
        "moe": "this plugin",
        "dense": "dense S x E x C formulation",
        "flop-matched": "FLOP-matched dense model",
    }
    for offset, name in enumerate(names):
        have = [(i, g["speeds"][name], g) for i, g in enumerate(groups) if name in g["speeds"]]
        if not have:
            continue
        drawn = axis.bar(
            [i + (offset - 1) * width for i, *_ in have],
            [s for _, s, _ in have],
            width,
            color=figures.COLORS[name],
            label=about[name],
        )
        axis.bar_label(
            drawn, [_speed_label(name, speed, g) for _, speed, g in have], fontsize=8, padding=2
        )
    axis.set_xticks(range(len(groups)), [group["label"] for group in groups], fontsize=8)
    axis.set_ylabel("tokens/s of one rank")
    axis.set_ylim(0, 1.3 * max(max(group["speeds"].values()) for group in groups))
    axis.set_xlim(-0.6, len(groups) - 0.4)
    axis.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)
    _devices(axis, groups)


def _speed_label(name: str, speed: float, group: dict) -> str:
    if name == "moe" and "dense" in group["speeds"]:
        return f"{speed:,.0f}\n({speed / group['speeds']['dense']:.2f} x dense form)"
    return f"{speed:,.0f}"


FIGURES = {
    "single_layer.png": ("layer", draw_layer),
    "alltoall.png": ("alltoall", draw_alltoall),
    "end_to_end.png": ("train", draw_training),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for files that are no results, 1 where matplotlib is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of the benchmarks")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/figures"),
        metavar="FOLDER",
        help="default: runs/figures",
    )
    options = parser.parse_args(argv)
    quiet_logs()
    try:
        results = load(options.results)
    except ValueError as error:
        sys.stderr.write(f"plot.py: error: {error}\n")
        return 2
    if not figures.has_matplotlib():
        return 1
    pyplot = figures.load_pyplot()
    for name, (benchmark, function) in FIGURES.items():
        function(pyplot, results.get(benchmark, []), options.out / name)
        say(f"drawn: {options.out / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
