"""Draw README's figure, and that of the page of balance, from recorded results.

    python scripts/bench/plot.py

overview.png: the loss of a golden run beside Meta's own, and this layer's time over that of other
layers at several shapes, with 95 % intervals.
balance.png: rows of 4 ranks without and with help, and the time of a step with busy ranks.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure
from program import quiet_logs
from record import ROOT, median_ratio, say

from fairseq_tutel.distributed.balance import plan_moves

RESULTS = ROOT / "scripts" / "bench" / "results"
FIGURES = RESULTS / "figures"
_GREY, _BLUE, _LINE = "#b0b7c3", "#1d4ed8", "#333333"
PEERS = {
    "meta+tutel": ("Meta's layer with Tutel's dispatcher", _BLUE),
    "tutel": ("Tutel", "#2f5d50"),
    "mixtral": ("Hugging Face's Mixtral block", "#c2570c"),
    "meta": ("Meta's layer with dense masks", _GREY),
}
SHAPES = ("base", "large", "many", "few-tokens", "top1", "wide", "short")


def read(path: Path) -> dict:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def figure_of(height: float, *widths: float) -> tuple[Figure, list]:
    """Return a figure and its panels, side by side, without frames."""
    figure = Figure(figsize=(12, height), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(widths), width_ratios=widths)
    for axis in panels:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, panels


def draw(path: Path) -> None:
    """Draw both panels of overview.png."""
    figure, (curve, bars) = figure_of(3.8, 1, 1.7)
    ours = read(RESULTS / "golden-top2_world2.json")
    meta = read(ROOT / "tests" / "golden" / ours["preset"] / "log.json")["train"]
    updates, loss = range(1, len(meta) + 1), [row["loss"] for row in meta]
    label = "Meta's code (fairseq, branch moe)"
    curve.plot(updates, loss, color=_GREY, linewidth=7, label=label)
    style = {"color": _BLUE, "ms": 3.5, "lw": 1.2, "label": "this plugin on stock fairseq"}
    curve.plot(updates, ours["results"]["loss"], "o-", **style)
    curve.set(title="The same run: 2 ranks, top-2", xlabel="update", ylabel="loss (bits per token)")
    curve.set_xticks([1, 5, 10, 15, 20])

    peers = read(RESULTS / "peers-2.json")
    width, labels = 0.8 / len(PEERS), []
    for place, name in enumerate(SHAPES):
        shape = peers["results"][f"{name}: tutel"]["shape"]
        size = "{tokens} tokens\n{model_dim}/{hidden_dim}\n{experts} experts\ntop-{top_k}"
        labels.append(size.format(**shape))
        for number, (peer, (label, color)) in enumerate(PEERS.items()):
            low, ratio, high = peers["results"][f"{name}: {peer}"]["this_over"][peer]
            x = place + (number - (len(PEERS) - 1) / 2) * width
            label = label if place == 0 else None
            bars.bar(x, ratio, width=0.9 * width, color=color, label=label)
            bars.errorbar(x, ratio, [[ratio - low], [high - ratio]], color=_LINE, lw=0.9)
    bars.axhline(1, color=_LINE, lw=1)
    bars.set_xticks(range(len(SHAPES)), labels, fontsize=8)
    threads = peers["hardware"]["threads"]
    title = f"One layer, forward + backward, {threads} CPU threads"
    ylabel = "this layer's time over theirs\n(below 1: this layer is faster)"
    bars.set(ylim=(0, 1.3), title=title, ylabel=ylabel)
    for axis, columns in ((curve, 1), (bars, 2)):
        axis.legend(frameon=False, fontsize=8, ncols=columns)
        axis.grid(alpha=0.4, axis="y")
        axis.set_axisbelow(True)
    figure.savefig(path)


def draw_balance(path: Path) -> None:
    """Draw the three panels of balance.png."""
    figure, (before, after, bars) = figure_of(3.6, 1, 1, 1.5)
    rows_E = [4600, 900, 700, 500, 400, 400, 300, 200]  # of 8 experts on 4 ranks
    at_home = [(e // 2, e, rows) for e, rows in enumerate(rows_E)]
    _loads(before, at_home, "Rows without help")
    moves = plan_moves(rows_E, 4)
    helped = [(move.helper, move.expert, move.end - move.begin) for move in moves]
    left = {e: sum(rows for _, expert, rows in helped if expert == e) for e in range(8)}
    parts = [(rank, e, rows - left[e]) for rank, e, rows in at_home] + helped
    _loads(after, parts, "Rows with help (hatched: weights travelled)")

    found = read(RESULTS / "balance-2.json")["results"]
    for number, (case, color) in enumerate((("not helped", _GREY), ("helped", _BLUE))):
        for place, of in enumerate(found.values()):
            ratio = median_ratio(of, case, "even")
            x = place + 0.4 * (number - 0.5)
            bars.bar(x, ratio, 0.36, color=color, label=case if place == 0 else None)
            bars.text(x, ratio + 0.02, f"{ratio:.2f}", ha="center", fontsize=8)
    bars.axhline(1, color=_LINE, lw=1)
    bars.set_xticks(range(len(found)), list(found))
    bars.set(title="Step of 2 ranks (CPU)", xlabel="utilisation of the ranks")
    bars.set_ylabel("time over that of even loads")
    bars.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _loads(axis, parts, title):
    """Draw (rank, expert, rows) as stacked bars of ranks."""
    ends = [0.0] * 4
    dark = [_BLUE, "#2f5d50", "#c2570c", "#6b7280"]
    light = ["#93b4f5", "#93c9b5", "#f0b48a", "#c8cdd6"]
    for rank, expert, rows in parts:
        helped, shade = rank != expert // 2, (dark, light)[expert % 2][expert // 2]
        style = {"hatch": "//", "edgecolor": "white"} if helped else {}
        bar = axis.bar(rank, rows, bottom=ends[rank], color=shade, **style)
        if rows > 250:
            box = {"color": shade, "pad": 1}
            labels = [f"e{expert}"]
            axis.bar_label(bar, labels, label_type="center", color="white", fontsize=8, bbox=box)
        ends[rank] += rows
    axis.axhline(sum(ends) / 4, color=_LINE, lw=1, ls="--")
    axis.set_xticks(range(4), [f"rank {rank}" for rank in range(4)])
    axis.set_ylim(0, 5800)
    axis.set_title(title, fontsize=10)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    quiet_logs()
    for name, function in (("overview.png", draw), ("balance.png", draw_balance)):
        function(FIGURES / name)
        say(f"drawn: {FIGURES / name}")
