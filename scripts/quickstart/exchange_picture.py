"""What the tuner of a run tried and chose over training, as a picture.

    python scripts/quickstart/exchange_picture.py SAVE_DIR     # exchange.jsonl -> exchange.png

One panel per key (what decides how long an exchange takes: sizes, and a bucket of capacities): a
dot for each trial, a line for the choice in use.
"""

import argparse
import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

_COLORS = ("#4878a8", "#c44e52", "#55a868", "#8172b2", "#ccb974", "#64b5cd", "#777777", "#937860")
_DPI = 150


def read(file: Path) -> list[dict]:
    """Lines of ``exchange.jsonl``; one that a crash cut short is left out."""
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def name(choice: dict) -> str:
    """Of an exchange choice, such as "2dh d=4"."""
    short = {"overlap_degree": "d", "r": "r"}
    return " ".join(f"{short[k]}={v}" if k in short else str(v) for k, v in choice.items())


def draw(lines: list[dict], picture: Path) -> None:
    """Milliseconds of trials and choices over updates, one panel per key."""
    keys = list(dict.fromkeys(line["key"] for line in lines))
    names = list(dict.fromkeys(name(line["choice"]) for line in lines))
    colors = {each: _COLORS[i % len(_COLORS)] for i, each in enumerate(names)}
    end = max(line["update"] for line in lines)
    figure = Figure(figsize=(7.5, 1.2 + 2.2 * len(keys)), layout="constrained")
    grid = figure.subplots(len(keys), 1, sharex=True, squeeze=False)
    for axes, key in zip(grid[:, 0], keys, strict=True):
        mine = [line for line in lines if line["key"] == key]
        for line in mine:
            if line["what"] == "trial":
                time = statistics.median(line["samples"]) / 1000
                axes.plot(line["update"], time, "o", color=colors[name(line["choice"])])
        decisions = [line for line in mine if line["what"] == "decision"]
        ends = [*(line["update"] for line in decisions), end][1:]
        for line, until in zip(decisions, ends, strict=False):
            color = colors[name(line["choice"])]
            axes.hlines(line["us"] / 1000, line["update"], max(until, line["update"] + 1), color)
        axes.set_title(key, fontsize="medium")
        axes.set(ylabel="ms per step", ylim=(0, None))
        axes.grid(alpha=0.3)
    grid[-1, 0].set_xlabel("update (dots: trials; lines: the choice in use)")
    grid[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [Line2D([], [], marker="o", color=colors[each], label=each) for each in names]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    figure.savefig(picture, dpi=_DPI)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("save_dir", type=Path, help="of a run with --moe-overlap-degree auto")
    folder = parser.parse_args().save_dir
    file = folder / "exchange.jsonl"
    lines = read(file) if file.exists() else []
    if not lines:
        raise SystemExit(f"error: {file}: no trial is written there")
    draw(lines, folder / "exchange.png")


if __name__ == "__main__":
    main()
