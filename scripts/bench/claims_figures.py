"""Figures of the published claims: predicted lines, published points, points measured on a cluster.

A ladder is the folder of scripts/slurm/submit_ladder.sh, with files NAME-N.json of N GPUs.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from claims_predictions import MIB, a100, end_to_end_plans, layer_times, linear_over_2dh
from record import ROOT

from fairseq_tutel.config import EXCHANGES

RESULTS = ROOT / "scripts" / "bench" / "results"
_COLORS = ("#4878a8", "#c44e52", "#55a868", "#8172b2", "#ccb974", "#64b5cd", "#777777", "#937860")
_GPUS = tuple(2**power for power in range(3, 12))
_PAPER = "paper (arXiv 2206.03382)"
_OWN = "measured on this cluster"
_LAYER = "16,384 tokens per GPU, width 2,048, two experts per GPU, half precision"

Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """Lines over logarithmic axes."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[tuple[str, Points, str]]  # label, (x, y) in order, matplotlib's format
    ticks: Mapping[float, str]  # x -> its label


def _ticks(counts: Sequence[float]) -> dict[float, str]:
    return {count: f"{count:,}" for count in counts}


def _size(size: int) -> str:
    unit = max(power for power in (0, 10, 20, 30) if size >> power)
    return f"{size >> unit} {({0: 'B', 10: 'KiB', 20: 'MiB', 30: 'GiB'})[unit]}"


def _ladder(folder: Path | None, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (ranks, results) of the files NAME-N.json of a ladder, by N."""
    found = {}
    for path in folder.glob(f"{name}-*.json") if folder else ():
        if path.stem.removeprefix(f"{name}-").isdigit():
            content = json.loads(path.read_text(encoding="utf-8"))
            found[content["world_size"]] = content["results"]
    yield from sorted(found.items())


def _layer_ms(ladder: Path | None) -> tuple[dict[int, float], dict[int, float]]:
    """Return milliseconds of the ladder's dense formulation and of this layer, by ranks."""
    dense, this = {}, {}
    for ranks, results in _ladder(ladder, "layer"):
        (found,) = results.values()
        for name in ("dense", "torch", "triton"):  # triton's before torch's, where both are
            if name in found["ms"]:
                (dense if name == "dense" else this)[ranks] = found["ms"][name]["both"]["p50"]
    return dense, this


def layer_speedup(claims: Mapping, ladder: Path | None) -> Chart:
    """Return dense over this layer by GPUs: figure 1 of the announcement."""
    times = {gpus: layer_times(gpus) for gpus in _GPUS}
    dense, this = _layer_ms(ladder)
    own = [(n, dense[n] / this[n]) for n in dense.keys() & this]
    lines = [
        ("predicted: linear exchange, no overlap", [(n, t[0] / t[1]) for n, t in times.items()], "-"),
        ("predicted: best exchange and overlap", [(n, t[0] / t[2]) for n, t in times.items()], "--"),
        ("published: announcement", list(zip((8, 512), claims[1].published, strict=True)), "o"),
        (f"published: {_PAPER}, figure 14",
         list(zip((16, 2048), claims[22].published, strict=True)), "s"),
        (_OWN, sorted(own), "D-"),
    ]  # fmt: skip
    title = "PREDICTED: speed-up of one MoE layer over fairseq's dense formulation, A100"
    return Chart(f"{title}\n{_LAYER}", "GPUs", "times as fast", lines, _ticks(_GPUS))


def layer_time(claims: Mapping, ladder: Path | None) -> Chart:
    """Return milliseconds of one layer by GPUs: figure 14 of the paper."""
    cases = (
        ("fairseq's dense formulation", "-"),
        ("this layer, linear exchange, no overlap", "-"),
        ("this layer, best exchange and overlap", "--"),
    )
    lines = [
        (f"predicted: {case}", [(gpus, 1e3 * layer_times(gpus)[number]) for gpus in _GPUS], style)
        for number, (case, style) in enumerate(cases)
    ]
    dense, this = _layer_ms(ladder)
    lines.append((f"{_OWN}: dense formulation", list(dense.items()), "s-"))
    lines.append((f"{_OWN}: this layer", list(this.items()), "D-"))
    title = "PREDICTED: time of one MoE layer, forward and backward, A100"
    return Chart(f"{title}\n{_LAYER}", "GPUs", "milliseconds", lines, _ticks(_GPUS))


def alltoall_bandwidth(claims: Mapping, ladder: Path | None) -> Chart:
    """Return bus bandwidth by message size: figure 2 of the announcement."""
    sizes, gpus, lines = [2**power for power in range(12, 31)], 512, []
    for name, title, style in (("linear", "linear", "-"), ("2dh", "2DH", "--")):
        predict = EXCHANGES.get(name).predict
        speeds = [(s, s * (gpus - 1) / gpus / predict(s, gpus, a100()) / 1e9) for s in sizes]
        lines.append((f"predicted: {title}, {gpus} GPUs", speeds, style))
    for kind, about in (("alltoall", "bound"), ("alltoall-unbound", "not bound")):
        for ranks, results in list(_ladder(ladder, kind))[-1:]:  # the largest rung
            for name in ("linear", "2dh"):
                points = [of for of in results.values() if name in of["derived"]]
                speeds = [(of["bytes"], of["derived"][name]["busbw GB/s"]) for of in points]
                lines.append((f"{_OWN}: {name}, {ranks} ranks, {about} to cores", speeds, "o-"))
    return Chart(
        "PREDICTED: all-to-all bandwidth of a GPU, 512 A100, one 200 Gbit/s port each\n"
        "Published: CPU binding and adaptive routing give 2.56 to 5.93 times at hundreds of MiB.\n"
        "No formula has congestion, so neither is predicted.",
        "bytes that a GPU hands to one all-to-all",
        "bus bandwidth, GB/s",
        lines,
        {size: _size(size) for size in sizes[::3]},
    )


def large_model_tokens(claims: Mapping, ladder: Path | None) -> Chart:
    """Return tokens per second of the 1.1T model by GPUs: figure 3 of the announcement."""
    rungs = [gpus for gpus in _GPUS if gpus <= 512]
    dense, this = (
        {gpus: end_to_end_plans(gpus)[number].tokens_per_second for gpus in rungs}
        for number in (0, 1)
    )
    published = zip((8, 512), claims[2].published, strict=True)
    own: dict[str, list[tuple[float, float]]] = {"moe": [], "dense": []}
    for ranks, results in _ladder(ladder, "train"):
        for point in results.values():
            for variant in own.keys() & point["derived"]:
                own[variant].append((ranks, point["derived"][variant]["tokens/s"]))
    over_fairseq = [(gpus, dense[gpus] * times) for gpus, times in published]
    lines = [
        ("predicted: this package", list(this.items()), "-"),
        ("predicted: fairseq's own implementation", list(dense.items()), "-"),
        ("published: +131 % and +40 %, over the line of fairseq", over_fairseq, "o"),
        (f"{_OWN}: this package", own["moe"], "D-"),
        (f"{_OWN}: dense formulation", own["dense"], "s-"),
    ]
    title = "PREDICTED: training of Meta's 1.1T model, one expert per GPU and layer, A100"
    return Chart(title, "GPUs", "tokens per second", lines, _ticks(rungs))


def gain_of_2dh(claims: Mapping, ladder: Path | None) -> Chart:
    """Return the linear all-to-all over 2DH by GPUs: figure 20 of the paper."""
    counts = [2**power for power in range(3, 13)]
    lines = [
        (f"predicted: {_size(size)} per GPU", [(n, linear_over_2dh(size, n)) for n in counts[1:]], style)
        for size, style in ((MIB // 16, ":"), (MIB, "-"), (32 * MIB, "--"), (256 * MIB, "-."))
    ]  # fmt: skip
    small, own = [(2048, times) for times in claims[21].published], []
    lines.append((f"published: {_PAPER}, small messages", small, "o"))
    bed = [(8, times) for times in claims[21].values()]
    lines.append(("measured: 8 CPU ranks on two nodes, 4 KiB", bed, "s"))
    for ranks, results in _ladder(ladder, "alltoall"):
        ms = min(results.values(), key=lambda found: found["bytes"])["ms"]
        if {"linear", "2dh"} <= ms.keys():
            own.append((ranks, ms["linear"]["wall"]["p50"] / ms["2dh"]["wall"]["p50"]))
    lines.append((f"{_OWN}: smallest message", own, "D-"))
    title = "PREDICTED: 2DH all-to-all over the linear one, A100, nodes of 8"
    return Chart(title, "GPUs", "times as fast (below 1: slower)", lines, _ticks(counts))


def layer_tokens(claims: Mapping, ladder: Path | None) -> Chart:
    """Return the dense formulation over this layer by tokens, measured on one core."""
    results = json.loads((RESULTS / "curve-cpu.json").read_text(encoding="utf-8"))["results"]
    derived = {point["tokens"]: point["derived"]["dense"] for point in results.values()}
    kinds = (
        ("measured", "times longer", "o"),
        ("predicted: the planner's formula", "predicted", "-"),
    )
    return Chart(
        "MEASURED: time of the dense formulation over this layer's, one CPU core\n"
        "width 256, hidden 1,024, 8 experts, top-2, forward and backward, fp32",
        "tokens",
        "times as long",
        [(label, [(n, of[key]) for n, of in derived.items()], style) for label, key, style in kinds],
        _ticks(list(derived)),
    )  # fmt: skip


FIGURES: dict[str, Callable[[Mapping, Path | None], Chart]] = {
    "layer-speedup": layer_speedup,
    "layer-time": layer_time,
    "alltoall-bandwidth": alltoall_bandwidth,
    "tokens-1.1t": large_model_tokens,
    "2dh": gain_of_2dh,
    "layer-tokens": layer_tokens,
}


def draw_figures(folder: Path, ladder: Path | None, claims: Mapping) -> list[Path]:
    """Draw all figures; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in FIGURES.items():
        _draw(make(claims, ladder), folder / f"claims-{name}.png")
    return [folder / f"claims-{name}.png" for name in FIGURES]


def _draw(chart: Chart, path: Path) -> None:
    """Draw the lines that have points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    ticks = dict(chart.ticks)
    for (label, points, style), color in zip(chart.lines, _COLORS, strict=False):
        if points:
            axes.plot(*zip(*points, strict=True), style, color=color, label=label)
        if chart.xlabel == "GPUs":  # a cluster may have other numbers of them
            ticks.update(_ticks([gpus for gpus, _ in points]))
    axes.set(xscale="log", yscale="log", xlabel=chart.xlabel, ylabel=chart.ylabel)
    axes.set_title(chart.title, fontsize="medium")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    bottom, top = axes.get_ylim()
    digits = "12345678" if top < 10 * bottom else "125"

    def shown(y: float, _: int) -> str:
        text = f"{y:,.0f}" if y >= 1000 else f"{y:g}"
        return text if f"{y:e}"[0] in digits else ""

    axes.yaxis.set_major_formatter(shown)
    axes.yaxis.set_minor_formatter(shown)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
