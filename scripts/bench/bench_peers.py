"""One MoE layer beside those of Tutel, Meta and Hugging Face, forward and backward, fp32, on a CPU.

    python scripts/bench/bench_peers.py --tutel DIR --meta DIR --transformers DIR

Each folder holds the other library, built (results/METHOD.md says how); a library without a folder
is left out. This layer and a peer take turns, then the next peer follows. The ratio is this layer's
time over the peer's in the same turn, with a 95 % interval of its median.

Good: the interval ends below 1.02 ("not slower").

Threads of one process may be slower than those of the next (51 or 72 ms for the same work). With
``--processes N`` everything is measured in N processes, one after the other, each with weights and
data of its own, and the intervals are of their medians.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cases import LayerInputs, make_case
from harness import Case, Point, median_interval, percentiles, show, sweep
from peers import FOLDERS, Peer, gated_layer, peers_of
from program import Ranks, Report, expect_known, program, words
from record import say
from shapes import PEER_SHAPES

from fairseq_tutel.distributed import build_groups

_NOT_SLOWER = 1.02
# what each peer is compared with: this layer with a capacity, without dropping, with gated experts
PEERS = {
    "experts": "padded",
    "meta+tutel": "padded",
    "meta": "padded",
    "tutel": "padded",
    "tutel dropless": "dropless",
    "mixtral": "gated",
}
OPTIONS = {
    **FOLDERS,
    "transformers": (Path, "folder that transformers is in"),
    "shapes": (words, f"of {', '.join(PEER_SHAPES)} (default: all)"),
    "repetitions": (21, "of each case, in each process"),
    "processes": (1, "that measure"),
}


def points(names: list[str], options: argparse.Namespace, ranks: Ranks) -> Iterator[Point]:
    """This layer and one peer, for each shape and peer."""
    for name in names:
        tiny = {"tokens": 256, "model_dim": 16, "hidden_dim": 48} if options.tiny else {}
        shape = dataclasses.replace(PEER_SHAPES[name], **tiny)
        torch.manual_seed(options.seed)
        peers, missing = peers_of(shape, options.tutel, options.meta, options.transformers)
        groups, device = build_groups(shape.experts), ranks.device
        inputs = LayerInputs(shape, groups, device, options.seed)
        without = dataclasses.replace(shape, capacity_factor=0.0)
        dropless = LayerInputs(without, groups, device, options.seed)

        def forward(peer: Peer, number: int, inputs: LayerInputs = inputs):
            x, dy = (tensors[number % len(tensors)] for tensors in (inputs.x, inputs.dy))
            outputs = peer.run(x)
            return outputs, [dy, *(torch.full_like(loss, 0.01) for loss in outputs[1:])]

        def case(name: str, peer: Peer, forward=forward, inputs: LayerInputs = inputs) -> Case:
            leaves = [*peer.module.parameters(), *inputs.x]
            return Case(name, functools.partial(forward, peer), lambda: leaves)

        ours = {
            "padded": make_case("torch", inputs, "torch"),
            "dropless": make_case("torch", dropless, "torch"),
            "gated": case("gated", gated_layer(shape, options.seed)),
        }
        theirs = {"experts": make_case("experts", inputs, "torch")}
        theirs |= {name: case(name, peer) for name, peer in peers.items()}
        about = {"shape": dataclasses.asdict(shape)}
        for peer, their in theirs.items():
            mine = dataclasses.replace(ours[PEERS[peer]], name=PEERS[peer])
            left_out = missing if peer == "experts" else {}  # said once
            yield Point(f"{name}: {peer}", [mine, their], about, left_out, verdict_of)


def verdict_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each peer whether this layer is shown to be not slower."""
    over = found["this_over"]
    return {name: {"not slower": over[name][2] < _NOT_SLOWER} for name in over}


def in_a_process(number: int, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure all shapes in a process of its own; its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peers.json"
        given = {
            **{"processes": 1, "seed": options.seed + number, "output": path},
            **{"threads": torch.get_num_threads(), "shapes": ",".join(names)},
            **{key: getattr(options, key) for key in ("repetitions", *FOLDERS, "transformers")},
        }
        flags = [(f"--{key}", str(value)) for key, value in given.items() if value]
        command = [sys.executable, str(Path(__file__).resolve()), *itertools.chain(*flags)]
        command += ["--tiny"] if options.tiny else []
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if status:
            raise ValueError(f"process {number + 1} ended with {status}: {' '.join(command)}")
        say(f"process {number + 1} of {options.processes} has measured")
        return json.loads(path.read_text(encoding="utf-8"))["results"]


def merge(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of processes; ratios are medians of their medians."""
    merged = {}
    for name, first in processes[0].items():
        all_of = [results[name] for results in processes]
        ms = {}
        for case in first["ms"]:
            times = itertools.chain(*(of["raw_ms"][case]["both"] for of in all_of))
            ms[case] = {"both": percentiles(list(times))}
        over = {}
        for case in first["this_over"]:
            over[case] = median_interval([of["this_over"][case][1] for of in all_of])
        merged[name] = {**first, "ms": ms, "this_over": over}
        merged[name]["derived"] = verdict_of(merged[name])
        merged[name]["raw_ms"] = [of["raw_ms"] for of in all_of]
    return merged


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the commit or version of each peer."""
    found = {}
    for name in FOLDERS:
        if folder := getattr(options, name):
            command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
            done = subprocess.run(command, capture_output=True, text=True)
            found[name] = done.stdout.strip() or "unknown"
    if options.transformers:
        path = [str(options.transformers)]
        packages = importlib.metadata.distributions(path=path, name="transformers")
        found["transformers"] = next((each.version for each in packages), "unknown")
    return found


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    names = options.shapes or list(PEER_SHAPES)
    expect_known("--shapes", names, list(PEER_SHAPES))
    if min(options.processes, options.repetitions) < 1:
        raise ValueError("--processes and --repetitions must be at least 1")
    if 1 < options.processes < 6 and not options.tiny:
        raise ValueError(f"{options.processes} medians have no 95 % interval: give 6 --processes")
    about = {"peers": versions(options), "rule": _NOT_SLOWER}
    about |= {"processes": options.processes, "repetitions": options.repetitions}
    default, measured = f"peers-{torch.get_num_threads()}", []
    with Report("peers", ranks, options.output, default, **about) as report:
        if options.processes == 1:
            sweep(report, points(names, options, ranks), ranks, options.repetitions)
            return
        for number in range(options.processes):
            measured.append(in_a_process(number, names, options))
            report.keep(lambda: {"results": merge(measured)}, ended=True)
        report.finish({"results": merge(measured)}, show)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
