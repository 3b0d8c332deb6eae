"""One MoE layer beside those of Tutel, Meta and Hugging Face, forward and backward.

    python scripts/bench/bench_peers.py --tutel DIR --meta DIR --transformers DIR
    python scripts/bench/bench_peers.py --device cuda --shapes gpu-blog,gpu-wide --tutel DIR

Each folder holds the other library, built (results/README.md says how); a library without a folder
is left out. This layer and a peer take turns, then the next peer follows. The ratio is this layer's
time over the peer's in the same turn, with a 95 % interval of its median.

Good: the interval ends below 1.02 ("not slower"). A known GPU also has predicted times.

Threads of one process may be slower than those of the next (51 or 72 ms for the same work). With
``--processes N`` everything is measured in N processes, one after the other, each with weights and
data of its own, and the intervals are of their medians.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Point, sweep
from layers import PEER_SHAPES, Inputs, LayerShape, make_cases, make_layer
from peers import FOLDERS, gated_layer, peers_of
from predict import beside, layer_ms, rates_of
from program import program, words
from record import Report, median_interval, percentiles, say

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
    "shapes": (words, "what to measure (default: all of the device)", PEER_SHAPES),
    "repetitions": (21, "of each case, in each process"),
    "processes": (1, "that measure"),
}


def points(name, options, ranks) -> Iterator[Point]:
    """Yield this layer and one peer, for each peer at one shape."""
    device, seed = ranks.device, options.seed
    tiny = {"tokens": 256, "model_dim": 16, "hidden_dim": 48} if options.tiny else {}
    shape = dataclasses.replace(PEER_SHAPES[name], **tiny)
    torch.manual_seed(seed)
    folders = options.tutel, options.meta, options.transformers
    peers, missing = peers_of(shape, device, *folders)
    gated, inputs = gated_layer(shape, device, seed), Inputs(shape, device, seed)
    padded, dropless = (make_layer(shape, device, seed, capacity_factor=f) for f in (1.0, 0.0))
    backend = "triton" if device.type == "cuda" else "torch"
    with_capacity, experts = make_cases([backend, "experts"], padded, shape, inputs)
    (without,) = make_cases([backend], dropless, shape, inputs)
    ours = {
        "padded": with_capacity,
        "dropless": without,
        "gated": inputs.case("gated", gated, gated.parameters()),
    }
    theirs = {"experts": experts}
    for peer, made in peers.items():
        theirs[peer] = inputs.case(peer, made.run, made.module.parameters())
    for peer, their in theirs.items():
        mine = dataclasses.replace(ours[PEERS[peer]], name=PEERS[peer])
        left_out = missing if peer == "experts" else {}  # said once
        expected = predicted_ms(shape, device, mine.name)
        about = {"shape": dataclasses.asdict(shape), "predicted_ms": expected}
        derive = partial(verdict_of, predicted=expected)
        yield Point(f"{name}: {peer}", [mine, their], about, left_out, derive)


def predicted_ms(shape: LayerShape, device: torch.device, mine: str) -> dict[str, float]:
    """Return the milliseconds of this layer and of the experts alone on a known GPU."""
    rates = rates_of(device)
    found = layer_ms(shape, rates) if rates else {}
    return {mine: found["triton"], "experts": found["experts"]} if found else {}


def verdict_of(found: dict[str, Any], predicted: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Return for each peer whether this layer is shown to be not slower, and predictions."""
    over, ms = found["this_over"], found["ms"]
    columns = {name: beside(of["both"]["p50"], predicted.get(name)) for name, of in ms.items()}
    for name, (*_, high) in over.items():
        columns[name]["not slower"] = high < _NOT_SLOWER
    return {name: given for name, given in columns.items() if given}


def in_a_process(number, options) -> dict[str, Any]:
    """Return the results of a process of its own that measures all shapes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peers.json"
        command = [sys.executable, str(Path(__file__).resolve()), *options.argv]
        command += ["--processes", "1", "--seed", str(options.seed + number), "--output", str(path)]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if status:
            raise ValueError(f"process {number + 1} ended with {status}: {' '.join(command)}")
        say(f"process {number + 1} of {options.processes} has measured")
        return json.loads(path.read_text(encoding="utf-8"))["results"]


def merge(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of processes; ratios are medians of their medians."""
    merged = {}
    for name, first in processes[0].items():
        raw = [results[name]["raw_ms"] for results in processes]
        ms, over = {}, {}
        for case in first["ms"]:
            times = itertools.chain(*(of[case]["both"] for of in raw))
            ms[case] = {"both": percentiles(list(times))}
        for case in first["this_over"]:
            medians = [results[name]["this_over"][case][1] for results in processes]
            over[case] = median_interval(medians)
        merged[name] = {**first, "ms": ms, "this_over": over, "raw_ms": raw}
        merged[name]["derived"] = verdict_of(merged[name], first["predicted_ms"])
    return merged


def versions(options) -> dict[str, str]:
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


@program(__doc__, OPTIONS)
def main(options, ranks):
    if min(options.processes, options.repetitions) < 1:
        raise ValueError("--processes and --repetitions must be at least 1")
    if 1 < options.processes < 6 and not options.tiny:
        raise ValueError(f"{options.processes} medians have no 95 % interval: give 6 --processes")
    on_gpu = ranks.device.type == "cuda"
    file = f"peers-{'cuda' if on_gpu else torch.get_num_threads()}"
    about = {"peers": versions(options), "rule": _NOT_SLOWER}
    about |= {"processes": options.processes, "repetitions": options.repetitions}
    if options.processes == 1:
        of_device = [name for name in PEER_SHAPES if name.startswith("gpu-") == on_gpu]
        shapes = options.shapes or of_device
        found = itertools.chain.from_iterable(points(name, options, ranks) for name in shapes)
        sweep("peers", options, ranks, found, repetitions=21, file=file, about=about)
        return
    report = Report("peers", ranks, options.output or f"runs/bench/{file}.json", **about)
    measured = []
    for number in range(options.processes):
        measured.append(in_a_process(number, options))
        report.write({"results": merge(measured)})
    report.write({"results": merge(measured)}, complete=True)


if __name__ == "__main__":
    sys.exit(main())
