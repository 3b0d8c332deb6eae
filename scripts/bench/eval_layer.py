"""bench_layer.py --mode eval: one layer in evaluation, beside Meta's, Tutel's and dense ones."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from eval_cases import ABOUT, expected_ratio, layers_of, make_layer, random_tokens
from measure import Case, median_interval, percentiles, time_cases
from presets import LayerShape, choose_shape
from ranks import Ranks
from record import device_name, say, table
from runner import Report, add_clock, check_clock, expect_known, words

from fairseq_tutel import ops

TOKENS = (1, 4, 16, 64, 256, 1024)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that evaluation alone has."""
    add_clock(parser)
    add = parser.add_argument_group("--mode eval").add_argument
    counts = ",".join(map(str, TOKENS))
    add("--eval-tokens", help=f"numbers of tokens (default: {counts})", **words(int))
    add("--tutel", type=Path, metavar="DIR", help="repository of Tutel, built in place")
    add("--meta", type=Path, metavar="DIR", help="fairseq/modules/moe of fairseq's branch moe")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    if ranks.world_size > 1:
        raise ValueError("--mode eval measures one rank")
    check_clock(options, ranks)
    name, shape = choose_shape(options, options.presets[0], ranks)
    shape = dataclasses.replace(shape, simulated_ranks=0, dtype="float32")
    counts = options.eval_tokens or ((4, 16) if options.tiny else TOKENS)
    path = Path(options.output or f"runs/bench/layer-eval-{name}-{ranks.device.type}.json")
    about = {"about": ABOUT, "settings": dataclasses.asdict(shape)}
    about["clock"] = "processor" if options.processor_time else "wall"
    report = Report("layer-eval", ranks, path, **about)
    results: dict[str, Any] = {}
    layer = make_layer(shape)
    for tokens in counts:
        results[str(tokens)] = measure(dataclasses.replace(shape, tokens=tokens), layer, options)
        report.keep(lambda: {"results": results})
    report.finish({"results": results}, show)


def measure(shape: LayerShape, layer: torch.nn.Module, options) -> dict[str, Any]:
    """All layers on so many tokens, taking turns."""
    torch.manual_seed(options.seed)
    ops.set_backend("torch")
    stored = ("bf16", "int8") if shape.tokens <= 64 else ("bf16",)
    if options.backends:
        expect_known("--backends", options.backends, list(ABOUT))
        stored = tuple(name for name in stored if name in options.backends)
    made, missing = layers_of(shape, layer, tutel=options.tutel, meta=options.meta, stored=stored)
    wanted = {"layer", *(options.backends or made)}
    made = {name: run for name, run in made.items() if name in wanted}
    x = random_tokens(shape, options.seed)

    def case(run):
        def forward(number):
            with torch.no_grad():
                return (run(x[number % len(x)]),), ()

        return forward

    cases = [Case(name, case(run)) for name, run in made.items()]
    # calls of a millisecond: more of them
    repetitions = options.repetitions or (100 if shape.tokens <= 64 else 20)
    how = {"warmup": options.warmup, "processor_time": options.processor_time}
    times = time_cases(cases, torch.device("cpu"), repetitions, **how)
    of = {name: values["forward"] for name, values in times.items()}
    return {
        "ms": {name: percentiles(values) for name, values in of.items()},
        "over_layer": {
            name: dict(zip(("low", "median", "high"), median_interval(pairs), strict=True))
            for name, values in of.items()
            if (pairs := [a / b for a, b in zip(values, of["layer"], strict=True)])
        },
        "expected": {name: expected_ratio(name, shape) for name in of},
        "not_run": missing,
        "raw_ms": of,
    }


def show(result: dict[str, Any]) -> None:
    """Times of the layer, and how many times as long the others take."""
    size = result["settings"]
    say(
        f"MoE layer in evaluation on {device_name(result)}: {size['model_dim']}/"
        f"{size['hidden_dim']}, {size['experts']} experts, top-{size['top_k']}, fp32"
    )
    names = [name for name in ABOUT if any(name in of["ms"] for of in result["results"].values())]
    rows = [{"tokens": tokens, **of} for tokens, of in result["results"].items()]

    def cell(name):
        def text(row):
            if name not in row["ms"]:
                return "-"
            if name in ("layer", "products"):
                return f"{row['ms'][name]['p50']:.3f}"
            of, wanted = row["over_layer"][name], row["expected"][name]
            by = "" if wanted is None else f", by formula {wanted:.2f}"
            return f"{of['median']:.2f} ({of['low']:.2f}-{of['high']:.2f}){by}"

        return text

    titles = {"layer": "layer ms", "products": "products ms"}
    columns = {titles.get(name, name): cell(name) for name in names}
    say(table(rows, {"tokens": "{tokens}"} | columns))
    say("others: times this layer's, median of turns (95 % interval)")
