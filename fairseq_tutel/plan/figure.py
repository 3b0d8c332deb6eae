"""The ladder as a figure of three panels: memory, time and throughput."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from .planner import GB, Plan
from .report import time_rows

# Bottom to top; those of Memory.at_peak.
_MEMORY = (
    "weights",
    "fp32 copies",
    "optimizer statistics",
    "gradients",
    "activations",
    "working set of a layer",
    "logits",
    "buffers",
)


def draw(plans: Sequence[Plan], path: Path) -> None:
    """Write the figure to ``path`` (its suffix chooses the format).

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--figure needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    # fairseq turns the root logger's debug messages on, and matplotlib lists every font
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    gpus = [str(plan.settings.gpus) for plan in plans]
    _memory(axes[0], gpus, plans)
    _time(axes[1], gpus, plans)
    _throughput(axes[2], gpus, plans)
    first = plans[0]
    figure.suptitle(
        f"{first.settings.name} on {first.hardware.title}: predicted by the planner, not measured"
    )
    for axis in axes:
        axis.set_xlabel("GPUs")
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _stacked(axis, gpus, columns: list[dict[str, float]], order: Sequence[str]) -> None:
    bottom = [0.0] * len(gpus)
    for name in order:
        heights = [column.get(name, 0.0) for column in columns]
        if any(heights):
            axis.bar(gpus, heights, bottom=bottom, label=name, width=0.8)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axis.set_ylim(0, 1.42 * max(bottom))
    axis.legend(fontsize=8, loc="upper left", ncols=2)


def _memory(axis, gpus, plans) -> None:
    columns = [{name: size / GB for name, size in p.memory.at_peak.items()} for p in plans]
    _stacked(axis, gpus, columns, _MEMORY)
    limit = plans[0].usable_memory / GB
    axis.axhline(limit, color="black", linestyle="--", linewidth=1)
    axis.text(
        len(gpus) - 0.5, limit, f"{limit:.0f} GB to fill ", ha="right", va="bottom", fontsize=8
    )
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.5 * limit))
    axis.set_title("memory of one GPU at the peak")
    axis.set_ylabel("GB")


def _time(axis, gpus, plans) -> None:
    columns = [dict(time_rows(plan)) for plan in plans]
    _stacked(axis, gpus, columns, [name for name, _ in time_rows(plans[0])])
    for index, plan in enumerate(plans):
        if plan.work.exchanges:
            axis.text(
                index,
                plan.time.total,
                f"{plan.time.all_to_all_share:.0%}",
                ha="center",
                va="bottom",
                fontsize=8,
            )
    axis.set_title("time of an update (percent: all-to-all)")
    axis.set_ylabel("seconds")


def _throughput(axis, gpus, plans) -> None:
    rates = [plan.tokens_per_second / plan.settings.gpus for plan in plans]
    axis.plot(gpus, rates, "o-")
    for name, rate, plan in zip(gpus, rates, plans, strict=True):
        axis.annotate(
            _short(plan.tokens_per_second),
            (name, rate),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_ylim(0, 1.25 * max(rates))
    axis.set_title("tokens per second and GPU (numbers: all GPUs)")
    axis.set_ylabel("tokens / s / GPU")


def _short(number: float) -> str:
    """Three digits and a unit: 18.8k, 1.00M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
