"""Draw README's figure from recorded results.

    python scripts/bench/plot.py [FOLDER]

overview.png: the loss of a golden run beside Meta's own, and this layer's time over that of other
layers at several shapes, with 95 % intervals.
"""

import argparse
import json
from pathlib import Path

from record import ROOT, quiet_logs, say

RESULTS = ROOT / "scripts" / "bench" / "results"
FIGURES = RESULTS / "figures"
_GREY, _BLUE = "#b0b7c3", "#1d4ed8"
PEERS = {
    "meta+tutel": ("Meta's layer with Tutel's dispatcher", "#1d4ed8"),
    "tutel": ("Tutel", "#2f5d50"),
    "mixtral": ("Hugging Face's Mixtral block", "#c2570c"),
    "meta": ("Meta's layer with dense masks", "#b0b7c3"),
}
SHAPES = ("base", "large", "many", "few-tokens", "top1", "wide", "short")


def read(path: Path) -> dict:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def draw(path: Path) -> None:
    """Draw both panels of overview.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), dpi=110, layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=[1, 1.7])
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
            bars.errorbar(x, ratio, [[ratio - low], [high - ratio]], color="#333333", lw=0.9)
    bars.axhline(1, color="#333333", lw=1)
    bars.set_xticks(range(len(SHAPES)), labels, fontsize=8)
    bars.set_ylim(0, 1.3)
    threads = peers["hardware"]["threads"]
    bars.set_title(f"One layer, forward + backward, {threads} CPU threads")
    bars.set_ylabel("this layer's time over theirs\n(below 1: this layer is faster)")
    for axis in (curve, bars):
        axis.legend(frameon=False, fontsize=8, ncols=2 if axis is bars else 1)
        axis.grid(alpha=0.4, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    quiet_logs()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    text = "for the picture (default: README's)"
    parser.add_argument("folder", nargs="?", type=Path, default=FIGURES, help=text)
    target = parser.parse_args().folder / "overview.png"
    draw(target)
    say(f"drawn: {target}")
