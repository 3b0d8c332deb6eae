"""Figures of single results: one per benchmark."""

from __future__ import annotations

import importlib.util
import logging
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import device_name

COLORS = {
    "dense": "#b0b7c3",
    "dense-loop": "#cfd4dc",
    "triton": "#c2410c",
    "torch": "#1d4ed8",
    "experts": "#4b8f8c",
    "products": "#2f5d50",
    "moe": "#1d4ed8",
    "flop-matched": "#2f5d50",
}
_GRID = {"color": "#d9dde3", "linewidth": 0.8}


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draw one result as a PNG file; False, and a word about it, where matplotlib is missing."""
    if not has_matplotlib():
        return False
    pyplot = load_pyplot()
    _DRAW[result["benchmark"]](pyplot, result, path)
    return True


def has_matplotlib() -> bool:
    """Whether figures can be drawn; says so where not."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        sys.stderr.write("no figure: matplotlib is not installed (pip install matplotlib)\n")
    return found


def load_pyplot():
    """matplotlib.pyplot for files, with this project's style."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "figure.dpi": 120,
        }
    )
    return pyplot


def save(pyplot, figure, path: Path) -> None:
    """Write a PNG file and forget the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def caption(result: dict[str, Any]) -> str:
    """Device, commit and date of a result."""
    commit = (result["commit"] or "no commit")[:7]
    return f"{device_name(result)}; {commit}, {result['date'][:10]}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _layer(pyplot, result, path):
    cases, shape = result["results"], result["settings"]
    figure, (time_axis, memory_axis) = pyplot.subplots(
        1, 2, figsize=(10, 1.6 + 0.45 * len(cases)), width_ratios=[3, 2], layout="constrained"
    )
    names = list(cases)[::-1]
    for phase, alpha in (("forward", 1.0), ("backward", 0.55)):
        left = [cases[n]["ms"]["forward"]["p50"] if phase == "backward" else 0.0 for n in names]
        widths = [cases[n]["ms"][phase]["p50"] for n in names]
        time_axis.barh(names, widths, left=left, alpha=alpha, color=[COLORS[n] for n in names])
    for name in names:
        both = cases[name]["ms"]["both"]
        time_axis.plot([both["p20"], both["p80"]], [name, name], color="black", linewidth=1.2)
        of = result["ratios"].get(name, {})
        factor = of.get("this/products both")
        label = f"{_short(both['p50'])} ms" + (f", {factor:.2f} x products" if factor else "")
        time_axis.annotate(
            label,
            (max(both["p50"], both["p80"]), name),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    time_axis.set_xlim(0, 1.45 * max(cases[n]["ms"]["both"]["p80"] for n in names))
    time_axis.set_title("Time, ms: forward (dark) + backward (light), line: p20 to p80")
    time_axis.grid(axis="x", **_GRID)
    time_axis.set_axisbelow(True)
    mib = [(cases[n]["peak_bytes"] or 0) / 2**20 for n in names]
    bars = memory_axis.barh(names, mib, color=[COLORS[n] for n in names])
    memory_axis.bar_label(bars, fmt="%.0f", padding=4, fontsize=9)
    memory_axis.set_xlim(0, 1.2 * max(*mib, 1))
    memory_axis.set_yticklabels([])
    memory_axis.set_title("Peak memory of a pass, MiB")
    simulated = shape["simulated_ranks"]
    ranks = f"SIMULATED rank of {simulated}" if simulated else f"{result['world_size']} rank(s)"
    figure.suptitle(
        f"One MoE layer: {shape['tokens']} tokens, {shape['model_dim']}/{shape['hidden_dim']}, "
        f"{shape['experts']} experts, top-{shape['top_k']}, {shape['dtype']}; {ranks}\n"
        f"{caption(result)}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    save(pyplot, figure, path)


def _kernels(pyplot, result, path):
    rows = [(row["name"], row["backend"], row["share_of_copy"]) for row in result["results"]]
    rows = [row for row in rows if row[2] is not None][::-1]
    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.28 * len(rows)), layout="constrained")
    labels = [f"{name} ({backend})" for name, backend, _ in rows]
    bars = axis.barh(
        labels,
        [100 * share for *_, share in rows],
        color=[COLORS.get(backend, "#888888") for _, backend, _ in rows],
    )
    axis.bar_label(bars, fmt="%.0f%%", padding=4, fontsize=9)
    axis.axvline(100, color="black", linewidth=1)
    axis.axvline(80, color="black", linewidth=0.8, linestyle=":")
    axis.grid(axis="x", **_GRID)
    axis.set_axisbelow(True)
    figure.suptitle(
        f"Bytes that must move over time, in % of a copy "
        f"({result['copy']['bytes_per_second'] / 1e9:.0f} GB/s in the same run)\n{caption(result)}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    save(pyplot, figure, path)


def _train(pyplot, result, path):
    runs = result["results"]
    names = list(runs)[::-1]
    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.5 * len(names)), layout="constrained")
    speeds = [runs[n]["tokens_per_second"]["p50"] for n in names]
    bars = axis.barh([runs[n]["about"] for n in names], speeds, color=[COLORS[n] for n in names])
    axis.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=9)
    axis.set_xlim(0, 1.15 * max(speeds))
    axis.grid(axis="x", **_GRID)
    axis.set_axisbelow(True)
    title = textwrap.fill(f"Training, tokens/s end to end: {result['title']}", 100)
    figure.suptitle(f"{title}\n{caption(result)}", fontsize=10, x=0.01, ha="left")
    save(pyplot, figure, path)


def _alltoall(pyplot, result, path):
    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    bandwidth_lines(axis, [result])
    axis.set_title(
        f"All-to-all, {result['world_size']} ranks, {result['backend']}\n{caption(result)}",
        fontsize=10,
    )
    save(pyplot, figure, path)


def _binding(result) -> str:
    """What the launcher did for the ranks, where it is not what it does by itself."""
    environment = result.get("environment", {})
    bind = environment.get("FAIRSEQ_TUTEL_BIND", "auto").split()[0]
    profile = environment.get("FAIRSEQ_TUTEL_NCCL_PROFILE", "none")
    words = [] if bind == "auto" else ["not bound" if bind == "none" else f"bound {bind}"]
    return "".join(f", {word}" for word in words + [profile][: profile != "none"])


def bandwidth_lines(axis, results) -> None:
    """Bus bandwidth by message size, one line per algorithm and number of ranks."""
    for result in results:
        for algorithm in result["settings"]["algorithms"]:
            rows = [row for row in result["results"] if row["algorithm"] == algorithm]
            axis.plot(
                [row["bytes"] for row in rows],
                [row["busbw"] / 1e9 for row in rows],
                marker="o",
                markersize=3.5,
                label=f"{algorithm}, {result['world_size']} ranks{_binding(result)}",
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("bytes sent by a rank, its own part included")
    axis.set_ylabel("bus bandwidth per rank, GB/s")
    axis.grid(**_GRID)
    axis.legend(frameon=False)


def _adaptive(pyplot, result, path):
    import adaptive_figure

    adaptive_figure.draw(pyplot, result, path)


def _flows(pyplot, result, path):
    import flows_figure

    flows_figure.draw(pyplot, result, path)


def _exchange(pyplot, result, path):
    import exchange_figures

    exchange_figures.draw(pyplot, result, path)


_DRAW: dict[str, Callable] = {
    "adaptive": _adaptive,
    "exchange": _exchange,
    "flows": _flows,
    "layer": _layer,
    "kernels": _kernels,
    "train": _train,
    "alltoall": _alltoall,
}
