"""README's figure, from two results: a golden run beside Meta's, and one layer's time.

python scripts/bench/plot.py [FILE.png]
"""

import json
import sys
from pathlib import Path

from record import ROOT, quiet_logs, say

RESULTS = ROOT / "scripts" / "bench" / "results"
FIGURE = RESULTS / "figures" / "overview.png"
GREY, BLUE, GREEN = "#b0b7c3", "#1d4ed8", "#2f5d50"
BARS = {
    "dense": ("dense S x E x C\nformulation", GREY),
    "torch": ("this layer", BLUE),
    "products": ("its matrix\nproducts alone", GREEN),
}


def read(path: Path) -> dict:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def draw(path: Path) -> None:
    """Loss beside Meta's own run; the layer's time beside the dense formulation's."""
    from matplotlib.figure import Figure

    ours, layer = read(RESULTS / "golden-top2_world2.json"), read(RESULTS / "layer-cpu.json")
    meta = read(ROOT / "tests" / "golden" / ours["preset"] / "log.json")["train"]
    figure = Figure(figsize=(10, 3.4), dpi=120, layout="constrained")
    curve, bars = figure.subplots(1, 2)
    updates, theirs = range(1, len(meta) + 1), [row["loss"] for row in meta]
    label = "Meta's implementation (fairseq, branch moe)"
    curve.plot(updates, theirs, color=GREY, linewidth=7, label=label)
    loss = ours["results"]["loss"]
    curve.plot(
        updates, loss, "o-", color=BLUE, ms=3.5, lw=1.2, label="this plugin on stock fairseq"
    )
    curve.set(title="The same run: 2 ranks, top-2", xlabel="update", ylabel="loss (bits per token)")
    curve.set_xticks([1, 5, 10, 15, 20])
    curve.legend(frameon=False)

    labels, colors = zip(*BARS.values(), strict=True)
    times = [layer["results"][name]["ms"]["both"]["p50"] for name in BARS]
    drawn = bars.bar(labels, times, width=0.6, color=colors)
    bars.bar_label(drawn, [f"{ms:,.0f} ms" for ms in times], padding=2)
    sizes, faster = layer["settings"], times[0] / times[1]
    bars.set_ylim(0, 1.12 * max(times))
    bars.set_title(f"One MoE layer, both passes ({faster:.1f} times faster)")
    bars.set_ylabel(f"ms, {sizes['tokens']} tokens, {sizes['experts']} experts, CPU")
    for axis in (curve, bars):
        axis.grid(alpha=0.4)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    quiet_logs()
    target = Path(*sys.argv[1:]) if sys.argv[1:] else FIGURE
    draw(target)
    say(f"drawn: {target}")
