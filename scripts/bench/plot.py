"""The figures of README, from results in files.

    python scripts/bench/plot.py [FOLDER]

overview.png: a golden run beside Meta's, and one layer's time. swin.png: SwinV2-MoE against the
dense formulation by images, and what its experts do for small models. growth.png: what growth gains
in a training (study_growth.py).
"""

import argparse
import json
from pathlib import Path

import study_growth
from record import ROOT, quiet_logs, say
from style import BLUE, GREEN, GREY, ORANGE, finish

RESULTS = ROOT / "scripts" / "bench" / "results"
FIGURES = RESULTS / "figures"
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
    finish(figure, path)


def draw_swin(path: Path) -> None:
    """Speed by images per rank with the formula; accuracy and load of every seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), dpi=110, layout="constrained")
    speed, accuracy, load = figure.subplots(1, 3, width_ratios=[1.3, 1, 1])
    ticks = {0}
    for mode, color, shift in (("inference", BLUE, 0.15), ("training", ORANGE, -0.15)):
        points = _rows(f"swin-{mode}-*.json", "results")
        points.sort(key=lambda row: row["images"])
        images = [row["images"] for row in points]
        ratios = [row["faster_than_dense_formulation"] for row in points]
        middle = [ratio["median"] for ratio in ratios]
        ends = [[abs(r["interval"][end] - r["median"]) for r in ratios] for end in (0, 1)]
        style = {"color": color, "capsize": 3, "lw": 1.2, "ms": 4}
        ticks.update(images)
        speed.errorbar(
            [n + shift for n in images], middle, ends, fmt="o-", label=f"{mode}, measured", **style
        )
        expected = [row["expected"] for row in points]
        speed.plot(images, expected, "--", color=color, lw=1, label=f"{mode}, by operations")
    speed.axhline(1, color=GREY, lw=1)
    speed.set_xticks(sorted(ticks), sorted(ticks))
    speed.set(
        xlim=(0, 1.05 * max(ticks)), xlabel="images per rank (batch size)", ylabel="times faster"
    )
    speed.set_title(
        "SwinV2-MoE, small, 1 thread: this layer\nagainst the dense S x E x C formulation"
    )
    speed.legend(frameon=False, fontsize=8)

    runs = _rows("swin-study-*.json", "runs")
    methods = list(dict.fromkeys(run["method"] for run in runs))
    colors = dict(zip(methods, (GREY, BLUE, GREEN, ORANGE), strict=False))
    data = list(dict.fromkeys(run["data"] for run in runs))
    for method in methods:
        for axis, value in ((accuracy, _accuracy), (load, _load)):
            mine = [run for run in runs if run["method"] == method]
            shown = [(run["data"], value(run)) for run in mine if value(run) is not None]
            shift = 0.15 * (methods.index(method) - (len(methods) - 1) / 2)
            places = [data.index(name) + shift for name, _ in shown]
            style = {"color": colors[method], "ms": 5, "mec": "white", "mew": 0.5}
            axis.plot(places, [y for _, y in shown], "o", label=method, **style)
    accuracy.set(title="Held-out accuracy, each seed", ylabel="%")
    load.set(title="Mean load / largest of the experts\nin training, each seed", ylabel="%")
    for axis in (accuracy, load):
        axis.set_xticks(range(len(data)), data)
        axis.set_xlim(-0.5, len(data) - 0.5)
    load.set_ylim(0, 100)
    names = {"dense": "dense", "losses": "experts, published losses",
             "load bias": "experts, load bias", "nothing": "experts, not balanced"}  # fmt: skip
    handles, labels = accuracy.get_legend_handles_labels()
    accuracy.legend(handles, [names[label] for label in labels], frameon=False, fontsize=8)
    finish(figure, path)


def draw_growth(path: Path) -> None:
    """Validation loss of the study's models."""
    study_growth.draw(read(RESULTS / "growth.json"), path)


def _rows(pattern: str, key: str) -> list[dict]:
    """Of all results whose file is named so."""
    return [row for path in sorted(RESULTS.glob(pattern)) for row in read(path)[key]]


def _accuracy(run: dict) -> float:
    return run["accuracy"]


def _load(run: dict) -> float | None:
    return run["use"] and run["use"]["load"]


DRAWN = {"overview.png": draw, "swin.png": draw_swin, "growth.png": draw_growth}


if __name__ == "__main__":
    quiet_logs()
    parser = argparse.ArgumentParser(description="The figures of README, from results in files.")
    text = "for the pictures (default: README's)"
    parser.add_argument("folder", nargs="?", type=Path, default=FIGURES, help=text)
    options = parser.parse_args()
    for name, drawing in DRAWN.items():
        drawing(options.folder / name)
        say(f"drawn: {options.folder / name}")
