"""loss.png and experts.png."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from metrics import Curves

_TRAIN, _VALID, _GREY = "#4878a8", "#c44e52", "#777777"
_DPI = 150


def draw_loss(curves: Curves, picture: Path) -> None:
    """Train and valid cross-entropy over updates, with the perplexity on the right."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    updates = sorted(curves.train)
    axes.plot(updates, [curves.train[u][0] for u in updates], color=_TRAIN, label="train")
    updates = sorted(curves.valid)
    axes.plot(
        updates,
        [curves.valid[u][0] for u in updates],
        color=_VALID,
        marker="o",
        markersize=4,
        label="valid",
    )
    for number, update in enumerate(u for u in curves.resumed if u > 1):
        label = "resumed from the checkpoint" if number == 0 else None
        axes.axvline(update, color=_GREY, linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="update", ylabel="loss (bits per token)")
    axes.set_title("Loss in training and validation (cross-entropy, without the gate loss)")
    axes.grid(alpha=0.3)
    axes.legend()
    perplexity = axes.secondary_yaxis("right", functions=(np.exp2, _bits))
    perplexity.set_ylabel("perplexity")
    perplexity.set_yscale("log")
    figure.savefig(picture, dpi=_DPI)


def _bits(perplexity):
    return np.log2(np.maximum(perplexity, 1e-9))  # the axis asks for 0, too


def draw_experts(
    updates: list[int],
    layers: dict[str, list[list[int]]],
    picture: Path,
    used: dict[int, dict[str, float]],
    independent: dict[str, float],
) -> None:
    """A heat map per MoE layer: each expert's load over updates, relative to an even share.

    Below, the utilisation of the experts (update -> by name) with what even but independent
    choices give (dashed).
    """
    figure = Figure(figsize=(7.5, 3.4 + 2.2 * len(layers)), layout="constrained")
    grid = figure.subplots(len(layers) + 1, 1, sharex=True, squeeze=False)
    _draw_utilisation(grid[-1, 0], used, independent)
    edges = [0, *updates]
    for axes, (layer, loads) in zip(grid[:-1, 0], layers.items(), strict=True):
        experts = len(loads[0])
        share = [[load * experts / max(1, sum(row)) for load in row] for row in loads]
        by_expert = list(zip(*share, strict=True))
        mesh = axes.pcolormesh(
            edges,
            [e - 0.5 for e in range(experts + 1)],
            by_expert,
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
        )
        axes.set(title=f"MoE layer decoder.layers.{layer}", ylabel="expert")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.invert_yaxis()
    grid[-1, 0].set_xlabel("update")
    bar = figure.colorbar(mesh, ax=grid[:-1, 0], extend="max", ticks=[0, 0.5, 1, 1.5, 2])
    bar.set_label("load: tokens routed to an expert\nrelative to an even share")
    figure.savefig(picture, dpi=_DPI)


def _draw_utilisation(axes, used, independent) -> None:
    names = {"moe_util_slot": "rows in use", "moe_util_load": "mean load / largest"}
    for (name, label), color in zip(names.items(), (_TRAIN, _VALID), strict=True):
        lines = [update for update in sorted(used) if name in used[update]]
        if not lines:
            continue
        axes.plot(lines, [used[update][name] for update in lines], color=color, label=label)
        axes.axhline(independent[name], color=color, linestyle="--", linewidth=1)
    axes.set(title="Utilisation (dashed: even but independent choices)", ylabel="%", ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
