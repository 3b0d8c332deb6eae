"""One MoE layer beside those of Tutel, Meta and Hugging Face, in one run.

    python scripts/bench/bench_peers.py --tutel DIR --meta DIR --transformers DIR

A folder is where somebody's code was built (results/README.md says how); those that are left out
are not run. This layer and a peer take turns, forward and backward, fp32, each beginning every
second turn; the next peer follows. Printed is the median of this layer's time over the peer's in
the same turn, with a 95 % interval; this layer is "not slower" where the interval ends below 1.02.

Two threads of one process may take 51 ms for what takes those of the next 72: with ``--processes``
everything is measured in that many, one after the other, each with weights and data of its own, and
the intervals are of their medians.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from layer_cases import LayerInputs, make_case
from measure import Case, free_memory, median_interval, percentiles, time_cases
from peers import (
    Peer,
    gated_width,
    meta_layer,
    mixtral_block,
    random_gradients,
    tutel_layer,
)
from presets import LayerShape
from ranks import Ranks
from record import device_name, say, table
from runner import Report, add_defaults, command_line, expect_known, words

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

_NOT_SLOWER = 1.02
# name -> tokens, M, F, E, K
SHAPES = {
    name: LayerShape(*sizes, top_k=top_k)
    for name, (*sizes, top_k) in {
        "base": (4096, 256, 1024, 8, 2),
        "large": (4096, 512, 2048, 8, 2),
        "many": (4096, 256, 1024, 64, 2),
        "few-tokens": (1024, 512, 2048, 16, 2),
        "top1": (2048, 256, 1024, 8, 1),
        "top1-many": (4096, 256, 1024, 128, 1),
        "top4": (2048, 256, 1024, 32, 4),
        "top8": (2048, 256, 512, 64, 8),
        "long": (16384, 256, 1024, 8, 2),
        "wide": (256, 1024, 4096, 4, 2),
        "short": (256, 256, 1024, 8, 2),
        "least": (256, 256, 1024, 1, 1),
        "one-expert": (4096, 256, 1024, 1, 1),
        "narrow": (8192, 128, 512, 8, 2),
    }.items()
}
# of each peer the case of this layer that does the same: with a capacity, without dropping, or with
# gated experts besides
PEERS = {
    "experts": "padded",
    "meta+tutel": "padded",
    "meta": "padded",
    "tutel": "padded",
    "tutel dropless": "dropless",
    "mixtral": "gated",
}
OURS = ("padded", "dropless", "gated")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--tutel", type=Path, metavar="DIR", help="repository of Tutel, built in place")
    add("--meta", type=Path, metavar="DIR", help="fairseq/modules/moe of fairseq's branch moe")
    add("--transformers", type=Path, metavar="DIR", help="folder that transformers is in")
    add("--shapes", help=f"of {', '.join(SHAPES)} (default: all)", **words())
    add("--tiny", action="store_true", help="rehearsal: 64 times fewer numbers")
    add_defaults(parser, {"repetitions": (21, "of each case, in each process")})
    add_defaults(parser, {"processes": (1, "that measure"), "seed": (1, "of weights and data")})
    add("--output", type=Path, help="JSON file (default: runs/bench/peers-THREADS.json)")
    options = parser.parse_args(argv)
    for folder in (options.tutel, options.meta, options.transformers):
        if folder is not None and not folder.is_dir():
            parser.error(f"{folder} is not a folder")
    if min(options.processes, options.repetitions) < 1:
        parser.error("--processes and --repetitions must be 1 at least")
    if 1 < options.processes < 6 and not options.tiny:
        parser.error(f"{options.processes} medians have no 95 % interval: give 6 --processes")
    return options


def shape_of(name: str, options: argparse.Namespace) -> LayerShape:
    """Of SHAPES, or of a rehearsal."""
    small = {"tokens": 256, "model_dim": 16, "hidden_dim": 48} if options.tiny else {}
    return dataclasses.replace(SHAPES[name], **small)


def peers_of(
    shape: LayerShape, options: argparse.Namespace
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The layers that there are, and name -> reason of the others."""
    tutel, meta = options.tutel, options.meta
    builders: dict[str, tuple[Any, Callable[[], Peer]]] = {
        "meta+tutel": (tutel and meta, lambda: meta_layer(meta, shape, tutel)),
        "meta": (meta, lambda: meta_layer(meta, shape, None)),
        "tutel": (tutel, lambda: tutel_layer(tutel, shape, shape.capacity_factor)),
        "tutel dropless": (tutel, lambda: tutel_layer(tutel, shape, 0.0)),
        "mixtral": (options.transformers, lambda: mixtral_block(options.transformers, shape)),
    }
    built, missing = {}, {}
    for name, (there, build) in builders.items():
        if not there:
            missing[name] = "no folder was given"
            continue
        try:
            built[name] = build()
        except ValueError as error:
            missing[name] = str(error)
    return built, missing


def gated_layer(shape: LayerShape, seed: int) -> Peer:
    """This layer as ``integrations.transformers.replace_moe`` puts it in a Mixtral block's place:
    gated experts without biases, no capacity, no balance loss."""
    layer = MoELayer(
        shape.model_dim,
        shape.experts,
        gated_width(shape),
        top_k=shape.top_k,
        capacity_factor=0.0,
        second_expert_policy="all",
        expert_network="swiglu",
        expert_options={"bias": False},
        compute_aux=False,
        seed=seed,
    )
    return Peer(lambda x: (layer(x),), layer)


def cases_of(
    shape: LayerShape, peers: dict[str, Peer], seed: int
) -> tuple[dict[str, Case], dict[str, Case]]:
    """This layer in its three ways; and what it is compared with: its experts alone, the peers."""
    device, groups = torch.device("cpu"), build_groups(shape.experts)
    inputs = LayerInputs(shape, groups, device, seed)
    dropless = LayerInputs(dataclasses.replace(shape, capacity_factor=0.0), groups, device, seed)

    def forward(peer: Peer, number: int):
        x, dy = (tensors[number % len(tensors)] for tensors in (inputs.x, inputs.dy))
        outputs = peer.run(x)
        return outputs, random_gradients(outputs, dy)

    def case(name: str, peer: Peer) -> Case:
        leaves = [*peer.module.parameters(), *inputs.x]
        return Case(name, functools.partial(forward, peer), lambda: leaves)

    ours = {
        "padded": make_case("torch", inputs, "torch"),
        "dropless": make_case("torch", dropless, "torch"),
        "gated": case("gated", gated_layer(shape, seed)),
    }
    theirs = {"experts": make_case("experts", inputs, "torch")}
    return ours, theirs | {name: case(name, peer) for name, peer in peers.items()}


def measure(shape: LayerShape, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of this layer and of each peer, pair by pair."""
    torch.manual_seed(options.seed)
    peers, missing = peers_of(shape, options)
    ours, theirs = cases_of(shape, peers, options.seed)
    raw = {}
    for name, case in theirs.items():
        way = PEERS[name]
        pair = [dataclasses.replace(ours[way], name=way), case]
        times = time_cases(pair, torch.device("cpu"), options.repetitions)
        raw[name] = {each: of["both"] for each, of in times.items()}
    return {"not_run": missing, "raw_ms": raw}


def measure_all(options: argparse.Namespace, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Shape -> what is measured so far in a process, after every shape."""
    measured = {}
    for name in names:
        measured[name] = measure(shape_of(name, options), options)
        free_memory(torch.device("cpu"))
        yield measured


def measure_in_processes(
    options: argparse.Namespace, names: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """Shape -> what was measured, of every process so far, after each of them."""
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.processes):
            path = Path(folder) / f"{number}.json"
            one = ["--processes", "1", "--seed", str(options.seed + number), "--output", str(path)]
            given = ["--threads", str(torch.get_num_threads()), "--shapes", ",".join(names)]
            given += ["--repetitions", str(options.repetitions), *["--tiny"][: options.tiny]]
            for peer in ("tutel", "meta", "transformers"):
                if folder_of_peer := getattr(options, peer):
                    given += [f"--{peer}", str(folder_of_peer)]
            command = [sys.executable, str(Path(__file__).resolve()), *given, *one]
            status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
            if status:
                raise ValueError(f"process {number + 1} ended with {status}: {' '.join(command)}")
            say(f"process {number + 1} of {options.processes} has measured")
            result = json.loads(path.read_text(encoding="utf-8"))["results"]
            measured.append({name: of | {"raw_ms": of["raw_ms"][0]} for name, of in result.items()})
            yield measured


def row_of(shape: LayerShape, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table, of what each process measured."""
    raw = [each["raw_ms"] for each in measured]
    ms = {}
    for name in (*OURS, *raw[0]):
        runs = [times[name] for of in raw for times in of.values() if name in times]
        if runs:
            ms[name] = percentiles([*itertools.chain(*runs)])
    return {
        "shape": dataclasses.asdict(shape),
        "ms": ms,
        "against": {name: compare(PEERS[name], name, raw) for name in raw[0]},
        "not_run": measured[0]["not_run"],
        "raw_ms": raw,
    }


def compare(way: str, peer: str, raw: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and interval of this layer's times over a peer's, and the verdict."""
    ratios = [
        [a / b for a, b in zip(times[peer][way], times[peer][peer], strict=True)] for times in raw
    ]
    of_processes = [percentiles(pairs)["p50"] for pairs in ratios]
    low, middle, high = median_interval(of_processes if len(raw) > 1 else ratios[0])
    return {"ratio": middle, "interval": [low, high], "not_slower": high < _NOT_SLOWER}


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Commit or version of each peer."""
    found = {}
    for name in ("tutel", "meta"):
        if folder := getattr(options, name):
            command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
            done = subprocess.run(command, capture_output=True, text=True)
            found[name] = done.stdout.strip() or "unknown"
    if options.transformers:
        path = [str(options.transformers)]
        packages = importlib.metadata.distributions(path=path, name="transformers")
        found["transformers"] = next((each.version for each in packages), "unknown")
    return found


def show(result: dict[str, Any]) -> None:
    """Times, and ratios with their intervals."""
    say(f"MoE layer, forward + backward, ms, on {device_name(result)}")

    def cell(name):
        def text(row):
            if name not in row["ms"]:
                return "-"
            time = f"{row['ms'][name]['p50']:.1f}"
            if name in OURS:
                return time
            of = row["against"][name]
            slower = "" if of["not_slower"] else " !"
            low, high = of["interval"]
            return f"{time}: {of['ratio']:.2f} ({low:.2f}-{high:.2f}){slower}"

        return text

    size = "{shape[tokens]}, {shape[model_dim]}/{shape[hidden_dim]}, {shape[experts]}, "
    shown = {"tokens, M/F, E, K": size + "{shape[top_k]}"}
    say(table(result["results"].values(), shown | {name: cell(name) for name in (*OURS, *PEERS)}))
    say("ms: this layer / that one (95 % interval of the median); !: not shown to be not slower")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    names = options.shapes or list(SHAPES)
    expect_known("--shapes", names, list(SHAPES))
    path = options.output or Path(f"runs/bench/peers-{torch.get_num_threads()}.json")
    about = {"peers": versions(options), "rule": _NOT_SLOWER}
    about |= {"processes": options.processes, "repetitions": options.repetitions}
    report = Report("peers", ranks, path, **about)
    results: dict[str, Any] = {}
    in_one = ([measured] for measured in measure_all(options, names))
    for measured in measure_in_processes(options, names) if options.processes > 1 else in_one:
        for name in measured[0]:
            of_name = [each[name] for each in measured]
            results[name] = row_of(shape_of(name, options), of_name)
        report.keep(lambda: {"results": results})
    report.finish({"results": results}, show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
