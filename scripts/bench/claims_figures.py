"""Figures of the published claims: predicted lines, published points, points measured on a cluster.

A ladder is the folder of scripts/slurm/submit_ladder.sh, with files NAME-N.json of N GPUs.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from claims_predictions import A100, MIB, end_to_end_plans, layer_times, linear_over_2dh
from record import ROOT

from fairseq_tutel.config import EXCHANGES

RESULTS = ROOT / "scripts" / "bench" / "results"
_COLORS = ("#4878a8", "#c44e52", "#55a868", "#8172b2", "#ccb974", "#64b5cd", "#777777", "#937860")
_GPUS = tuple(2**power for power in range(3, 12))
_PAPER = "published: paper (arXiv 2206.03382)"
_OWN = "measured on this cluster"
_LAYER = "16,384 tokens per GPU, width 2,048, two experts per GPU, half precision"
_SIZES = ("4 KiB", "32 KiB", "256 KiB", "2 MiB", "16 MiB", "128 MiB", "1 GiB")
_BYTES = {2 ** (12 + 3 * number): text for number, text in enumerate(_SIZES)}


class Chart(NamedTuple):
    """Lines over logarithmic axes: label, (x, y) in order, matplotlib's format of each."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[tuple[str, Iterable[tuple[float, float]], str]]


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
        ms = {name: phases["both"]["p50"] for name, phases in found["ms"].items()}
        for of, names in ((dense, ("dense",)), (this, ("torch", "triton"))):
            of.update((ranks, ms[name]) for name in names if name in ms)
    return dense, this


def layer_speedup(claims: Mapping, ladder: Path | None) -> Chart:
    """Return dense over this layer by GPUs: figure 1 of the announcement."""
    times, (dense, this) = [(n, *layer_times(n)) for n in _GPUS], _layer_ms(ladder)
    lines = [
        ("predicted: linear exchange, no overlap", [(n, d / t) for n, d, t, _ in times], "-"),
        ("predicted: best exchange and overlap", [(n, d / t) for n, d, _, t in times], "--"),
        ("published: announcement", zip((8, 512), claims[1].published, strict=True), "o"),
        (f"{_PAPER}, figure 14", zip((16, 2048), claims[22].published, strict=True), "s"),
        (_OWN, [(n, ms / this[n]) for n, ms in dense.items() if n in this], "D-"),
    ]
    title = "PREDICTED: speed-up of one MoE layer over fairseq's dense formulation, A100"
    return Chart(f"{title}\n{_LAYER}", "GPUs", "times as fast", lines)


def layer_time(claims: Mapping, ladder: Path | None) -> Chart:
    """Return milliseconds of one layer by GPUs: figure 14 of the paper."""
    times, (dense, this) = [(n, *layer_times(n)) for n in _GPUS], _layer_ms(ladder)
    lines = [
        ("predicted: fairseq's dense formulation", [(n, 1e3 * t) for n, t, _, _ in times], "-"),
        ("predicted: this layer, linear exchange, no overlap",
         [(n, 1e3 * t) for n, _, t, _ in times], "-"),
        ("predicted: this layer, best exchange and overlap",
         [(n, 1e3 * t) for n, _, _, t in times], "--"),
        (f"{_OWN}: dense formulation", dense.items(), "s-"),
        (f"{_OWN}: this layer", this.items(), "D-"),
    ]  # fmt: skip
    title = "PREDICTED: time of one MoE layer, forward and backward, A100"
    return Chart(f"{title}\n{_LAYER}", "GPUs", "milliseconds", lines)


def alltoall_bandwidth(claims: Mapping, ladder: Path | None) -> Chart:
    """Return bus bandwidth by message size: figure 2 of the announcement."""
    sizes, lines = [2**power for power in range(12, 31)], []
    for name, title, style in (("linear", "linear", "-"), ("2dh", "2DH", "--")):
        predict = EXCHANGES.get(name).predict
        speeds = [(s, s * 511 / 512 / predict(s, 512, A100) / 1e9) for s in sizes]
        lines.append((f"predicted: {title}, 512 GPUs", speeds, style))
    for kind, about in (("alltoall", "bound"), ("alltoall-unbound", "not bound")):
        for ranks, results in list(_ladder(ladder, kind))[-1:]:  # the largest rung
            for name in ("linear", "2dh"):
                points = [of for of in results.values() if name in of["derived"]]
                speeds = [(of["bytes"], of["derived"][name]["busbw GB/s"]) for of in points]
                lines.append((f"{_OWN}: {name}, {ranks} ranks, {about} to cores", speeds, "o-"))
    title = (
        "PREDICTED: all-to-all bandwidth of a GPU, 512 A100, one 200 Gbit/s port each\n"
        "Published: CPU binding and adaptive routing give 2.56 to 5.93 times at hundreds of MiB.\n"
        "No formula has congestion, so neither is predicted."
    )
    return Chart(title, "bytes that a GPU hands to one all-to-all", "bus bandwidth, GB/s", lines)


def large_model_tokens(claims: Mapping, ladder: Path | None) -> Chart:
    """Return tokens per second of the 1.1T model by GPUs: figure 3 of the announcement."""
    dense, this = (
        {n: end_to_end_plans(n)[number].tokens_per_second for n in _GPUS if n <= 512}
        for number in (0, 1)
    )
    own = {"moe": [], "dense": []}
    for ranks, results in _ladder(ladder, "train"):
        for point in results.values():
            for variant in own.keys() & point["derived"]:
                own[variant].append((ranks, point["derived"][variant]["tokens/s"]))
    published = zip((8, 512), claims[2].published, strict=True)
    over_fairseq = [(gpus, dense[gpus] * times) for gpus, times in published]
    lines = [
        ("predicted: this package", this.items(), "-"),
        ("predicted: fairseq's own implementation", dense.items(), "-"),
        ("published: +131 % and +40 %, over the line of fairseq", over_fairseq, "o"),
        (f"{_OWN}: this package", own["moe"], "D-"),
        (f"{_OWN}: dense formulation", own["dense"], "s-"),
    ]
    title = "PREDICTED: training of Meta's 1.1T model, one expert per GPU and layer, A100"
    return Chart(title, "GPUs", "tokens per second", lines)


def gain_of_2dh(claims: Mapping, ladder: Path | None) -> Chart:
    """Return the linear all-to-all over 2DH by GPUs: figure 20 of the paper."""
    lines = []
    for mib, size, style in ((1 / 16, "64 KiB", ":"), (1, "1 MiB", "-"), (32, "32 MiB", "--"),
                             (256, "256 MiB", "-.")):  # fmt: skip
        gains = [(gpus, linear_over_2dh(int(mib * MIB), gpus)) for gpus in (*_GPUS[1:], 4096)]
        lines.append((f"predicted: {size} per GPU", gains, style))
    own = []
    for ranks, results in _ladder(ladder, "alltoall"):
        ms = min(results.values(), key=lambda found: found["bytes"])["ms"]
        if {"linear", "2dh"} <= ms.keys():
            own.append((ranks, ms["linear"]["wall"]["p50"] / ms["2dh"]["wall"]["p50"]))
    lines += [
        (f"{_PAPER}, small messages", [(2048, *claims[21].published)], "o"),
        ("measured: 8 CPU ranks on two nodes, 4 KiB", [(8, *claims[21].values())], "s"),
        (f"{_OWN}: smallest message", own, "D-"),
    ]
    title = "PREDICTED: 2DH all-to-all over the linear one, A100, nodes of 8"
    return Chart(title, "GPUs", "times as fast (below 1: slower)", lines)


def layer_tokens(claims: Mapping, ladder: Path | None) -> Chart:
    """Return the dense formulation over this layer by tokens, measured on one core."""
    results = json.loads((RESULTS / "curve-cpu.json").read_text(encoding="utf-8"))["results"]
    found = [(point["tokens"], point["derived"]["dense"]) for point in results.values()]
    lines = [
        ("measured", [(tokens, of["times longer"]) for tokens, of in found], "o"),
        ("predicted: the planner's formula", [(n, of["predicted"]) for n, of in found], "-"),
    ]
    title = (
        "MEASURED: time of the dense formulation over this layer's, one CPU core\n"
        "width 256, hidden 1,024, 8 experts, top-2, forward and backward, fp32"
    )
    return Chart(title, "tokens", "times as long", lines)


FIGURES = {
    "layer-speedup": layer_speedup,
    "layer-time": layer_time,
    "alltoall-bandwidth": alltoall_bandwidth,
    "tokens-1.1t": large_model_tokens,
    "2dh": gain_of_2dh,
    "layer-tokens": layer_tokens,
}


def draw_figure(chart: Chart, path: Path) -> None:
    """Draw the lines that have points."""
    from matplotlib.figure import Figure

    figure, ticks = Figure(figsize=(7.5, 5), layout="constrained"), {}
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    for number, (label, points, style) in enumerate(chart.lines):
        if xy := list(zip(*points, strict=True)):
            color = _COLORS[number % len(_COLORS)]
            axes.plot(*xy, style, color=color, label=label)
            ticks.update({x: f"{x:,}" for x in xy[0]})
    axes.set(xscale="log", yscale="log", xlabel=chart.xlabel, ylabel=chart.ylabel)
    axes.set_title(chart.title, fontsize="medium")
    ticks = _BYTES if "bytes" in chart.xlabel else ticks
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    bottom, top = axes.get_ylim()
    digits = "12345678" if top < 10 * bottom else "125"

    def shown(y: float, _: float) -> str:
        return (f"{y:,.0f}" if y >= 1000 else f"{y:g}") if f"{y:e}"[0] in digits else ""

    axes.yaxis.set_major_formatter(shown)
    axes.yaxis.set_minor_formatter(shown)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
