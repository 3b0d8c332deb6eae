"""Figures of the published claims: predicted lines, published points, points measured on a cluster.

``python -m fairseq_tutel.plan claims --figures FOLDER [--measured LADDER]``; LADDER is the folder
of scripts/slurm/submit_ladder.sh, with layer-N.json, alltoall-N.json and train-N.json of N GPUs.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...config import EXCHANGES
from ...picture import Chart, Line, draw_chart
from ..layer import best_layer_time, layer_time
from .predictions import MIB, a100, end_to_end_plans, figure_14
from .report import RESULTS, measured
from .rows import CLAIMS

_GPUS = tuple(2**power for power in range(3, 12))
_PAPER = "paper (arXiv 2206.03382)"
_OF_A_LADDER = "measured on this cluster"


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


def _layer_ms(ladder: Path | None) -> dict[int, dict[str, float]]:
    """Return milliseconds by case of the ladder's layers, by ranks; ``this`` is the plugin's."""
    times = {}
    for ranks, results in _ladder(ladder, "layer"):
        (found,) = results.values()
        ms = {name: phases["both"]["p50"] for name, phases in found["ms"].items()}
        this = ms.get("triton", ms.get("torch"))
        times[ranks] = ms if this is None else {**ms, "this": this}
    return times


def _published(number: int, gpus: Sequence[int]) -> list[tuple[float, float]]:
    (claim,) = (claim for claim in CLAIMS if claim.number == number)
    return list(zip(gpus, claim.published, strict=True))


def speedup_of_a_layer(ladder: Path | None) -> Chart:
    """Return dense over this layer by GPUs: figure 1 of the announcement."""
    shapes = [(gpus, figure_14(gpus)) for gpus in _GPUS]
    dense = {gpus: layer_time(shape, a100(), dense=True) for gpus, shape in shapes}
    plain = [(gpus, dense[gpus] / layer_time(shape, a100())) for gpus, shape in shapes]
    best = [(gpus, dense[gpus] / best_layer_time(shape, a100())) for gpus, shape in shapes]
    own = [(n, ms["dense"] / ms["this"]) for n, ms in _layer_ms(ladder).items() if "dense" in ms]
    return Chart(
        "PREDICTED: speed-up of one MoE layer over fairseq's dense formulation, A100\n"
        "16,384 tokens per GPU, width 2,048, two experts per GPU, half precision",
        "GPUs",
        "times as fast",
        [
            Line("predicted: linear exchange, no overlap", plain),
            Line("predicted: best exchange and overlap", best, "--"),
            Line("published: announcement", _published(1, (8, 512)), "o"),
            Line(f"published: {_PAPER}, figure 14", _published(22, (16, 2048)), "s"),
            Line(_OF_A_LADDER, own, "D-"),
        ],
        _ticks(_GPUS),
    )


def time_of_a_layer(ladder: Path | None) -> Chart:
    """Return milliseconds of one layer by GPUs: figure 14 of the paper."""
    shapes = [(gpus, figure_14(gpus)) for gpus in _GPUS]
    own = _layer_ms(ladder)
    return Chart(
        "PREDICTED: time of one MoE layer, forward and backward, A100\n"
        "16,384 tokens per GPU, width 2,048, two experts per GPU, half precision",
        "GPUs",
        "milliseconds",
        [
            Line("predicted: fairseq's dense formulation",
                 [(n, 1e3 * layer_time(shape, a100(), dense=True)) for n, shape in shapes]),
            Line("predicted: this layer, linear exchange, no overlap",
                 [(n, 1e3 * layer_time(shape, a100())) for n, shape in shapes]),
            Line("predicted: this layer, best exchange and overlap",
                 [(n, 1e3 * best_layer_time(shape, a100())) for n, shape in shapes], "--"),
            Line(f"{_OF_A_LADDER}: dense formulation",
                 [(n, ms["dense"]) for n, ms in own.items() if "dense" in ms], "s-"),
            Line(f"{_OF_A_LADDER}: this layer",
                 [(n, ms["this"]) for n, ms in own.items() if "this" in ms], "D-"),
        ],
        _ticks(_GPUS),
    )  # fmt: skip


def bandwidth_of_the_all_to_all(ladder: Path | None) -> Chart:
    """Return bus bandwidth by message size: figure 2 of the announcement."""
    sizes, gpus = [2**power for power in range(12, 31)], 512
    lines = []
    for name, title, style in (("linear", "linear", "-"), ("2dh", "2DH", "--")):
        predict = EXCHANGES.get(name).predict
        speeds = [(s, s * (gpus - 1) / gpus / predict(s, gpus, a100()) / 1e9) for s in sizes]
        lines.append(Line(f"predicted: {title}, {gpus} GPUs", speeds, style))
    for kind, about in (("alltoall", "bound"), ("alltoall-unbound", "not bound")):
        runs = list(_ladder(ladder, kind))
        for ranks, results in runs[-1:]:  # the largest rung
            for name in ("linear", "2dh"):
                speeds = [
                    (found["bytes"], found["derived"][name]["busbw GB/s"])
                    for found in results.values()
                    if name in found["derived"]
                ]
                label = f"{_OF_A_LADDER}: {name}, {ranks} ranks, {about} to cores"
                lines.append(Line(label, speeds, "o-"))
    return Chart(
        "PREDICTED: all-to-all bandwidth of a GPU, 512 A100, one 200 Gbit/s port each\n"
        "Published: CPU binding and adaptive routing give 2.56 to 5.93 times at hundreds of MiB.\n"
        "No formula has congestion, so neither is predicted.",
        "bytes that a GPU hands to one all-to-all",
        "bus bandwidth, GB/s",
        lines,
        {size: _size(size) for size in sizes[::3]},
    )


def tokens_of_the_large_model(ladder: Path | None) -> Chart:
    """Return tokens per second of the 1.1T model by GPUs: figure 3 of the announcement."""
    rungs = [gpus for gpus in _GPUS if gpus <= 512]
    plans = {gpus: end_to_end_plans(gpus) for gpus in rungs}
    dense = {gpus: plan.tokens_per_second for gpus, (plan, _) in plans.items()}
    published = [(gpus, dense[gpus] * times) for gpus, times in _published(2, (8, 512))]
    own: dict[str, list[tuple[float, float]]] = {"moe": [], "dense": []}
    for ranks, results in _ladder(ladder, "train"):
        for point in results.values():
            for variant, found in point["derived"].items():
                if variant in own:
                    own[variant].append((ranks, found["tokens/s"]))
    return Chart(
        "PREDICTED: training of Meta's 1.1T model, one expert per GPU and layer, A100",
        "GPUs",
        "tokens per second",
        [
            Line(
                "predicted: this package", [(n, p[1].tokens_per_second) for n, p in plans.items()]
            ),
            Line("predicted: fairseq's own implementation", list(dense.items())),
            Line("published: +131 % and +40 %, over the line of fairseq", published, "o"),
            Line(f"{_OF_A_LADDER}: this package", own["moe"], "D-"),
            Line(f"{_OF_A_LADDER}: dense formulation", own["dense"], "s-"),
        ],
        _ticks(rungs),
    )


def gain_of_2dh(ladder: Path | None) -> Chart:
    """Return the linear all-to-all over 2DH by GPUs: figure 20 of the paper."""
    counts = [2**power for power in range(3, 13)]
    linear, two = (EXCHANGES.get(name).predict for name in ("linear", "2dh"))

    def gains(size: int) -> list[tuple[float, float]]:
        gpus = [count for count in counts if count >= 16]
        return [(n, linear(size, n, a100()) / two(size, n, a100())) for n in gpus]

    lines = [
        Line(f"predicted: {_size(size)} per GPU", gains(size), style)
        for size, style in ((MIB // 16, ":"), (MIB, "-"), (32 * MIB, "--"), (256 * MIB, "-."))
    ]
    lines.append(Line(f"published: {_PAPER}, small messages", _published(21, (2048,)), "o"))
    bed = [(8, entry.value) for entry in measured().get(21, ())]
    lines.append(Line("measured: 8 CPU ranks on two nodes, 4 KiB", bed, "s"))
    own = []
    for ranks, results in _ladder(ladder, "alltoall"):
        first = min(results.values(), key=lambda found: found["bytes"])
        ms = {name: phases["wall"]["p50"] for name, phases in first["ms"].items()}
        if {"linear", "2dh"} <= ms.keys():
            own.append((ranks, ms["linear"] / ms["2dh"]))
    lines.append(Line(f"{_OF_A_LADDER}: smallest message", own, "D-"))
    return Chart(
        "PREDICTED: 2DH all-to-all over the linear one, A100, nodes of 8",
        "GPUs",
        "times as fast (below 1: slower)",
        lines,
        _ticks(counts),
    )


def layer_over_tokens(ladder: Path | None) -> Chart:
    """Return the dense formulation over this layer by tokens, measured on one core."""
    path = RESULTS / "curve-cpu.json"
    points = (
        json.loads(path.read_text(encoding="utf-8"))["results"].values() if path.is_file() else ()
    )
    derived = [(point["tokens"], point["derived"]["dense"]) for point in points]
    return Chart(
        "MEASURED: time of the dense formulation over this layer's, one CPU core\n"
        "width 256, hidden 1,024, 8 experts, top-2, forward and backward, fp32",
        "tokens",
        "times as long",
        [
            Line("measured", [(tokens, found["times longer"]) for tokens, found in derived], "o"),
            Line("predicted: the planner's formula",
                 [(tokens, found["predicted"]) for tokens, found in derived]),
        ],
        _ticks([tokens for tokens, _ in derived]),
    )  # fmt: skip


FIGURES: dict[str, Callable[[Path | None], Chart]] = {
    "layer-speedup": speedup_of_a_layer,
    "layer-time": time_of_a_layer,
    "alltoall-bandwidth": bandwidth_of_the_all_to_all,
    "tokens-1.1t": tokens_of_the_large_model,
    "2dh": gain_of_2dh,
    "layer-tokens": layer_over_tokens,
}


def draw_figures(folder: Path, ladder: Path | None = None) -> list[Path]:
    """Draw all figures that have points; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, make in FIGURES.items():
        chart = make(ladder)
        if any(line.points for line in chart.lines):
            if chart.xlabel == "GPUs":  # a cluster may have other numbers of them
                more = _ticks([gpus for line in chart.lines for gpus, _ in line.points])
                chart = dataclasses.replace(chart, ticks=chart.ticks | more)
            drawn.append(folder / f"claims-{name}.png")
            draw_chart(chart, drawn[-1])
    return drawn
