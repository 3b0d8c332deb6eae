"""Time and bandwidth of the all-to-all by message size and algorithm; choices of the tuner.

    python -m fairseq_tutel.launch --nproc-per-node 2 -- python scripts/bench/bench_alltoall.py
    sbatch --nodes 64 --gpus-per-node 8 --exclusive scripts/slurm/bench_alltoall.sbatch
    sudo python scripts/bench/two_nodes.py --message-bytes 50000 -- \\
        python scripts/bench/bench_alltoall.py --sizes 4K,64K,1M --wires same,fp8
    sudo python scripts/bench/two_nodes.py --ranks 4 --message-bytes 50000 -- \\
        python scripts/bench/bench_alltoall.py --mode tuner

sizes: algorithms and wire formats take turns, in the terms of nccl-tests. A message is what one
rank hands to one all-to-all, its own part included. Algorithm bandwidth is message over time; bus
bandwidth is that times (W-1)/W, the share that leaves a rank. A time is that of the slowest rank.
"sent" are the bytes that this node's network interface (GLOO_SOCKET_IFNAME) counts for one message.
Good: the bus bandwidth of large messages is near the link's speed; 2dh is faster than linear for
small messages between nodes whose network has a cost per message; fp8 sends a quarter of the bytes.

tuner: one MoE layer on CPUs while its capacity factor changes, as the dynamic workload of Tutel's
paper (arXiv 2206.03382, section 2.3). A choice is an algorithm, a number of chunks of overlap (x4)
and of adaptive parallelism (r). First all choices take turns at every factor. Then the tuner
chooses while the factors go by, in turns with the best choice in hindsight. Good: the tuner takes
at most 1.10 times as long as that, trials included.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Case, Point, call, sweep
from program import Ranks, Report, expect_known, goal, program, words

from fairseq_tutel.config import EXCHANGES, WIRES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups
from fairseq_tutel.distributed.exchanges import Exchange
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.wire import WireCodec
from fairseq_tutel.tuning import ExchangeTuner
from fairseq_tutel.tuning.candidates import TUNABLE, build_choices

_UNITS = {"K": 10, "M": 20, "G": 30}
_ELEMENT, _ROW = 4, 128  # bytes of fp32, numbers of a row
_COUNTED = 4  # all-to-alls whose bytes are counted
_TOKENS, _MODEL_DIM, _HIDDEN_DIM = 64, 256, 384  # of the tuner's layer, which has 2 experts
_TUNER, _WORST = 1.10, 1.2  # goals: over the best choice in hindsight, and of the worst over it


def parse_sizes(text: str) -> list[int]:
    """Read bytes from ``4096,64K,256M,1G`` (powers of 1024)."""
    found = []
    for word in text.split(","):
        number, unit = (word[:-1], word[-1].upper()) if word[-1:].isalpha() else (word, "")
        if not number.isdigit() or int(number) < 1 or (unit and unit not in _UNITS):
            raise argparse.ArgumentTypeError(f"{word!r} is no size such as 4096, 64K, 256M or 1G")
        found.append(int(number) << _UNITS.get(unit, 0))
    return found


OPTIONS = {
    "mode": ("sizes", "sizes or tuner"),
    "backend": (str, "gloo or nccl (default: nccl on GPUs)"),
    "algorithms": (words, f"of {', '.join(EXCHANGES)} (default: all)"),
    "wires": (["same"], f"formats of fp32 rows, of {', '.join(WIRES)}"),
    "sizes": (parse_sizes, "bytes per rank (default: 64K to 64M, on GPUs to 1G, times 4)"),
    "iterations": (20, "all-to-alls back to back per measurement"),
    "repetitions": (5, "measurements per size, or of a choice at each factor"),
    "phases": (["1", "2", "4", "2", "1"], "tuner: capacity factors in order"),
    "steps": (120, "tuner: steps of a phase"),
    "ranks-per-node": (0, "0: as the machines have it"),
}


def link_name(backend: str) -> str:
    """Name the link of two_nodes.py in a word for a file name; else the backend."""
    bed = os.environ.get("TWO_NODES", "")
    return ("messages" if "--message-bytes" in bed else "bandwidth") if bed else backend


def sent_bytes() -> int | None:
    """Bytes that this node has sent on the link so far; None without such an interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    table = Path("/proc/self/net/dev").read_text(encoding="ascii")
    found = re.search(rf"^\s*{interface}:((?:\s+\d+)+)", table, re.MULTILINE)
    return int(found[1].split()[8]) if found else None


def count_sent(case: Case, ranks: Ranks) -> float | None:
    """Bytes on the link of one all-to-all, of several after one that connects."""
    case.run()
    ranks.wait()
    before = sent_bytes()
    for _ in range(_COUNTED):
        case.run()
    ranks.wait()
    return None if before is None else (sent_bytes() - before) / _COUNTED


def points(
    sizes: list[int], algorithms: list[str], options: argparse.Namespace, ranks: Ranks
) -> Iterator[Point]:
    """All algorithms and formats at each size."""
    groups, count = build_groups(ranks.world_size), ranks.world_size
    step = count * _ROW * _ELEMENT  # equal parts of whole rows
    for size in (max(step, size // step * step) for size in sizes):
        cases, columns = [], {}
        data = torch.randn(size // _ROW // _ELEMENT, _ROW, device=ranks.device)
        for name, wire in itertools.product(algorithms, options.wires):
            config = ExchangeConfig(name, options.ranks_per_node, wire=wire)
            plain = build_exchange(config, groups)
            codec = None if wire == "same" else WireCodec(config)
            exchange = Exchange(plain.algorithm, codec)
            title = name if wire == "same" else f"{name} {wire}"
            arguments = (data, None, exchange.new_record())
            cases.append(Case(title, call(functools.partial(exchange.dispatch, *arguments))))
            sent = count_sent(cases[-1], ranks)
            columns[title] = {"uses": exchange.name, "sent": sent}

        def derive(found, size=size, columns=columns):
            for title, of in found["ms"].items():
                speed = size / (1e6 * of["wall"]["p50"])
                bus = {"algbw GB/s": speed, "busbw GB/s": speed * (count - 1) / count}
                columns[title] |= bus
            return columns

        yield Point(f"{size:,}", cases, {"bytes": size}, derive=derive, phase="wall")


class Workload:
    """A layer whose experts are in slices, and its input."""

    def __init__(self, ranks_per_node: int):
        groups = build_groups(2, placement="sliced")
        exchange = ExchangeConfig(ranks_per_node=ranks_per_node)
        how = {"top_k": 2, "groups": groups, "seed": 1, "exchange": exchange}
        self.layer = MoELayer(_MODEL_DIM, 2, _HIDDEN_DIM, **how)
        torch.manual_seed(10 + groups.rank)
        self.x = torch.randn(_TOKENS, _MODEL_DIM, requires_grad=True)

    def step(self, factor: float, **how) -> None:
        """Run a forward and backward pass, with arguments for the layer's call."""
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        y = self.x + self.layer(self.x, capacity_factor=factor, **how)
        y.square().mean().backward()

    def case(self, name: str, choice: ExchangeConfig, factor: float) -> Case:
        """A step with one choice."""
        return Case(name, call(functools.partial(self.step, factor, exchange=choice)))


def tunable_choices(layer: MoELayer) -> dict[str, ExchangeConfig]:
    """Everything that the tuner can choose, by name."""
    axes = build_choices([layer], TUNABLE)
    products = itertools.product(*(axis.values for axis in axes))
    values = [dict(zip((a.name for a in axes), product, strict=True)) for product in products]
    simplest = {axis.name: axis.values[0] for axis in axes}
    values += [{**simplest, axis.name: value} for axis in axes for value in axis.standalone]
    choices = [dataclasses.replace(layer.exchange_config, **each) for each in values]
    return {name_of(choice): choice for choice in choices}


def name_of(choice: ExchangeConfig) -> str:
    """Name a choice, as in "2dh x4 r=2"."""
    return f"{choice.algorithm} x{choice.overlap_degree} r={choice.r}"


def tuner_points(options: argparse.Namespace) -> Iterator[Point]:
    """All fixed choices at each factor; then, phase by phase, the tuner and the best choice."""
    work, tuned = (Workload(options.ranks_per_node) for _ in range(2))
    choices = tunable_choices(work.layer)
    best: dict[float, str] = {}
    for factor in sorted(set(options.phases)):

        def find_best(found, factor=factor):
            medians = {name: of["forward"]["p50"] for name, of in found["ms"].items()}
            best[factor] = min(medians, key=medians.get)
            return {best[factor]: {"fastest": "yes"}}

        cases = [work.case(name, choice, factor) for name, choice in choices.items()]
        title = f"fixed, f={factor:g}"
        yield Point(title, cases, {}, {}, find_best, phase="", repetitions=options.repetitions)
    tuner = ExchangeTuner([tuned.layer], TUNABLE, max_loss=0.1)
    for number, factor in enumerate(options.phases, start=1):
        chosen: list[str] = []

        def tuned_step(factor=factor, chosen=chosen):
            step = tuner.agree(len(tuned.x), tuned.x.dtype, capacity_factor=factor)
            chosen.append(name_of(step.exchange))
            tuned.step(factor, step=step)

        def sums(found, factor=factor, chosen=chosen):
            last = {"tuner": chosen[-1], "best": best[factor]}
            raw = {name: found["raw_ms"][name]["forward"] for name in last}
            return {name: {"s": 1e-3 * sum(raw[name]), "choice": last[name]} for name in last}

        cases = [Case("tuner", call(tuned_step)), work.case("best", choices[best[factor]], factor)]
        yield Point(f"phase {number}, f={factor:g}", cases, derive=sums)


def tuner_goals(results: dict[str, Any], phases: list[float], steps: int) -> list[dict]:
    """Goals of all phases together."""
    derived = [of["derived"] for name, of in results.items() if name.startswith("phase")]
    if len(derived) < len(phases):
        return []
    tuner, best = (sum(of[name]["s"] for of in derived) for name in ("tuner", "best"))
    fixed = [results[f"fixed, f={factor:g}"]["ms"] for factor in phases]
    totals = [1e-3 * steps * sum(of[name]["forward"]["p50"] for of in fixed) for name in fixed[0]]
    text = f"the tuner takes at most {_TUNER} times the best choice in hindsight"
    worst = f"at least {_WORST} times faster than the worst choice kept throughout"
    return [goal(text, tuner / best, _TUNER, True), goal(worst, max(totals) / tuner, _WORST)]


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    expect_known("--mode", [options.mode], ["sizes", "tuner"])
    ranks.expect_several()
    algorithms = options.algorithms or sorted(EXCHANGES, reverse=True)  # linear first
    expect_known("--algorithms", algorithms, list(EXCHANGES))
    expect_known("--wires", options.wires, WIRES)
    options.phases = [float(factor) for factor in options.phases]
    most = 30 if ranks.device.type == "cuda" else 26
    if options.tiny:
        options.iterations, options.repetitions = 2, 2
        options.sizes = options.sizes or [1 << 12, 1 << 16]
    sizes = options.sizes or [1 << power for power in range(16, most + 1, 2)]
    link = link_name(ranks.backend)
    names = ("iterations", "repetitions", "ranks_per_node", "phases", "steps")
    about = {name: getattr(options, name) for name in names}
    about |= {"backend": ranks.backend, "link": link}
    kind = "alltoall" if options.mode == "sizes" else "adaptive"
    default = f"{kind}-{ranks.world_size}-{link}"
    with Report(kind, ranks, options.output, default, **about) as report:
        if options.mode == "sizes":
            found = points(sizes, algorithms, options, ranks)
            sweep(report, found, ranks, options.repetitions, calls=options.iterations, warmup=2)
            return
        found = tuner_points(options)
        goals = lambda results: tuner_goals(results, options.phases, options.steps)  # noqa: E731
        sweep(report, found, ranks, options.steps, warmup=0, goals=goals)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
