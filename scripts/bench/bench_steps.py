"""Steps of one MoE layer on several CPU ranks: beside Meta's layer, by exchange, by load, by r.

    sudo python scripts/bench/two_nodes.py --ranks 8 -- \\
        python scripts/bench/bench_steps.py --mode meta --meta DIR
    sudo python scripts/bench/two_nodes.py --ranks 8 -- \\
        python scripts/bench/bench_steps.py --mode share
    python -m fairseq_tutel.launch --nproc-per-node 2 -- \\
        python scripts/bench/bench_steps.py --mode load --utilisation 72,89
    sudo python scripts/bench/two_nodes.py --ranks 8 -- \\
        python scripts/bench/bench_steps.py --mode r

A step is a forward and a backward pass. A time is that of the slowest rank; cases take turns.

meta: this layer with every exchange and overlap degree, beside Meta's own layer (--meta, its folder
fairseq/modules/moe) with its masks and its all-to-all. Shape: figure 14 of arXiv 2206.03382, each
size divided by 8. Good: faster than Meta's by as much as the planner predicts.
share: the share of communication in a step, with the linear exchange of fp32 rows, and with 2DH,
fp16 and compact rows. Communication is what a step takes beyond the linear one with copies in place
of exchanges: links, casts and packing. Good: a smaller share.
load: a step without a capacity at forced utilisations: all ranks but one get fewer rows than the
busiest. Good: as many times faster as the busiest rank has fewer rows.
r: adaptive parallelism, with the shape of the paper's figure 12, each size divided by 16, at its
capacity factors, beside the time that the planner predicts. Good: the best r is the predicted one.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import Case, Point, ratio_of_pairs, sweep
from peers import FOLDERS, meta_layer
from program import Ranks, Report, expect_known, numbers, program
from record import ROOT
from shapes import SIZES, LayerShape

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, possible_r
from fairseq_tutel.moe import MoELayer, routing_counts
from fairseq_tutel.plan import layer as plan
from fairseq_tutel.plan.claims.predictions import times_of_r
from fairseq_tutel.plan.hardware import load_hardware

_LOSS_GRAD = 0.01
_SMALLEST = {
    "linear, fp32": ExchangeConfig(),
    "2dh, fp16, compact": ExchangeConfig("2dh", wire="fp16", wire_compact=True),
}
# of each rank; experts are those of all ranks
SHAPES = {
    "meta": lambda ranks: LayerShape(2048, 256, 256, 2 * ranks),
    "share": lambda ranks: LayerShape(1024, 256, 1024, 16 * ranks),
    "load": lambda ranks: LayerShape(2048, 256, 1024, 4 * ranks, capacity_factor=0.0),
    "r": lambda ranks: LayerShape(64, 128, 2048, max(1, ranks // 4)),
}
OPTIONS = {
    "mode": ("meta", ", ".join(SHAPES)),
    "repetitions": (10, "steps of each case"),
    "utilisation": (numbers, "load: percents of mean over busiest rank (default: 72,89)"),
    "factors": (numbers, "r: capacity factors (default: 1,2,4,8)"),
    "meta": FOLDERS["meta"],
    **{name: given for name, given in SIZES.items() if name not in ("dtype", "simulated-ranks")},
}


class Steps:
    """Layers of one shape, and the tokens and gradients of this rank."""

    def __init__(self, shape: LayerShape, ranks: Ranks, seed: int, placement: str = "replicated"):
        self.shape, self.seed = shape, seed
        self.groups = build_groups(shape.experts, placement=placement)
        generator = torch.Generator().manual_seed(seed + 1 + ranks.rank)
        size = shape.tokens, shape.model_dim
        self.x, self.dy = (torch.randn(size, generator=generator) for _ in range(2))
        self.x.requires_grad_()

    def layer(self, **options) -> MoELayer:
        """Build this layer."""
        shape = self.shape
        sizes = shape.model_dim, shape.experts, shape.hidden_dim
        how = {"top_k": shape.top_k, "capacity_factor": shape.capacity_factor, "seed": self.seed}
        return MoELayer(*sizes, groups=self.groups, **{**how, **options}).train()

    def case(self, name: str, module: Any, run: Callable | None = None, **call) -> Case:
        """A step of a module; ``run``: tokens -> (output, loss), default: a call of this layer."""

        def forward(_):
            if run is not None:
                y, loss = run(self.x)
            else:
                y, aux = module(self.x, return_aux=True, **call)
                loss = aux.loss
            return (y, loss), (self.dy, torch.tensor(_LOSS_GRAD))

        return Case(name, forward, lambda: [*module.parameters(), self.x])


def median_over(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median ratio of two cases' times in the same turn."""
    return ratio_of_pairs(above, below)[1]


def meta_points(steps: Steps, options: argparse.Namespace, ranks: Ranks) -> Iterator[Point]:
    """This layer by exchange and overlap degree, and Meta's."""
    layer = steps.layer()
    choices = [ExchangeConfig(*each) for each in itertools.product(("linear", "2dh"), [0], (1, 4))]
    layer.prepare_exchanges(choices)
    cases = [
        steps.case(f"{each.algorithm} x{each.overlap_degree}", layer, exchange=each)
        for each in choices
    ]
    if options.meta is None:
        raise ValueError("--mode meta needs --meta DIR, the folder of Meta's layer")
    cases.append(steps.case("copies", steps.layer(skip_exchange=True)))
    peer = meta_layer(options.meta, steps.shape, None)
    cases.append(steps.case("meta", peer.module, peer.run))

    def derive(found):
        raw = {name: of["both"] for name, of in found["raw_ms"].items()}
        faster = {name: median_over(raw["meta"], times) for name, times in raw.items()}
        columns = {name: {"times faster than Meta's": value} for name, value in faster.items()}
        best = max(faster.keys() - {"copies", "meta"}, key=faster.get)
        # what the exchanges take over the rest of a step, by which links can be compared
        exchange = median_over(raw["linear x1"], raw["copies"]) - 1
        columns["copies"] = {"linear exchange over the rest": exchange}
        columns["meta"] = {"over this layer's fastest": faster[best]}
        return columns

    yield Point(str(steps.shape), cases, {}, derive=derive)


def share_points(steps: Steps, options: argparse.Namespace, ranks: Ranks) -> Iterator[Point]:
    """Both exchanges, each beside the same step with copies."""
    cases = []
    for name, exchange in _SMALLEST.items():
        cases.append(steps.case(name, steps.layer(exchange=exchange)))
        alone = steps.layer(exchange=exchange, skip_exchange=True)
        cases.append(steps.case(f"{name}, copies", alone))

    def derive(found):
        raw = {name: of["both"] for name, of in found["raw_ms"].items()}
        shares = {}
        for name in _SMALLEST:
            rest = median_over(raw["linear, fp32, copies"], raw[name])
            own = median_over(raw[f"{name}, copies"], raw[name])
            shares[name] = {"communication %": 100 * (1 - rest), "links alone %": 100 * (1 - own)}
        return shares

    yield Point(str(steps.shape), cases, {}, derive=derive)


def shares(percent: float, experts: int, ranks: int) -> str:
    """Return a load whose mean rank has ``percent`` of the rows of the busiest, rank 0."""
    others = (ranks * percent / 100 - 1) / (ranks - 1)
    if not 0 <= others <= 1:
        raise ValueError(f"--utilisation {percent}: {ranks} ranks have {100 // ranks} to 100 %")
    local = experts // ranks
    return ",".join(["1"] * local + [f"{others:.6f}"] * (experts - local))


def load_points(steps: Steps, options: argparse.Namespace, ranks: Ranks) -> Iterator[Point]:
    """The same step at each utilisation, the lowest first."""
    asked = sorted(options.utilisation or [72, 89])
    cases, measured = [], {}
    for percent in asked:
        load = shares(percent, steps.shape.experts, ranks.world_size)
        layer = steps.layer(benchmark=True, force_load=load)
        with torch.no_grad():
            aux = layer(steps.x, return_aux=True)[1]
        counts = routing_counts([aux], steps.groups).received
        summed = torch.tensor(ranks.sums(counts[0].tolist()))
        measured[f"{percent} %"] = {"utilisation %": float(100 * summed.mean() / summed.max())}
        cases.append(steps.case(f"{percent} %", layer))

    def derive(found):
        raw = {name: of["both"] for name, of in found["raw_ms"].items()}
        for name, times in raw.items():
            measured[name]["times faster"] = median_over(raw[f"{asked[0]} %"], times)
        return measured

    yield Point(str(steps.shape), cases, {}, derive=derive)


def r_points(steps: Steps, options: argparse.Namespace, ranks: Ranks) -> Iterator[Point]:
    """Every r at each capacity factor."""
    layer = steps.layer(exchange=ExchangeConfig(r=1))
    choices = {f"r={r}": ExchangeConfig(r=r) for r in possible_r(steps.groups)}
    layer.prepare_exchanges(choices.values())
    hardware = load_hardware(ROOT / "configs", "two-nodes")
    for factor in options.factors or [1, 2, 4, 8]:
        sizes = dataclasses.astuple(steps.shape)[:4]
        planned = times_of_r(
            plan.LayerShape(*sizes, ranks.world_size, steps.shape.top_k, factor), hardware
        )
        cases = [
            steps.case(name, layer, exchange=choice, capacity_factor=float(factor))
            for name, choice in choices.items()
        ]

        def derive(found, planned=planned):
            raw = {name: of["both"] for name, of in found["raw_ms"].items()}
            return {
                f"r={r}": {
                    "times faster than r=1": median_over(raw["r=1"], raw[f"r={r}"]),
                    "predicted": planned[1] / planned[r],
                }
                for r in planned
            }

        yield Point(f"f={factor}", cases, {}, derive=derive)


POINTS = {"meta": meta_points, "share": share_points, "load": load_points, "r": r_points}


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    expect_known("--mode", [options.mode], list(SHAPES))
    ranks.expect_several()
    shape = SHAPES[options.mode](ranks.world_size)
    names = [field.name for field in dataclasses.fields(shape) if hasattr(options, field.name)]
    given = {name: getattr(options, name) for name in names}
    shape = dataclasses.replace(shape, **{k: v for k, v in given.items() if v is not None})
    if options.tiny:
        shape = dataclasses.replace(shape, tokens=128, model_dim=16, hidden_dim=32)
    placement = "sliced" if options.mode == "r" else "replicated"
    steps = Steps(shape, ranks, options.seed, placement)
    repetitions = 2 if options.tiny else options.repetitions
    default = f"steps-{options.mode}-{ranks.world_size}"
    about = {"mode": options.mode, "settings": dataclasses.asdict(shape)}
    with Report("steps", ranks, options.output, default, **about) as report:
        found = POINTS[options.mode](steps, options, ranks)
        sweep(report, found, ranks, repetitions, warmup=1 if options.tiny else 2)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
