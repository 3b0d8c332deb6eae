"""Exchanges of one MoE layer while its capacity factor changes: fixed choices, and the tuner.

    sudo python scripts/bench/two_nodes.py --ranks 4 --message-bytes 50000 -- \
        python scripts/bench/bench_exchange.py

A choice is an algorithm, a number of chunks of overlap (x4) and of adaptive parallelism (r). Every
phase has another capacity factor, as the dynamic workload of Tutel's paper (arXiv 2206.03382,
section 2.3). First all choices take turns at every factor, forward and backward; a time is that of
the slowest rank. Then the tuner chooses while the phases go by, and after each of its steps the
best choice in hindsight takes the same step.

Good: the tuner takes at most 1.10 times the best choice in hindsight, trials included, and chunks
make a step shorter if exchanges take as long as the experts.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bench_alltoall import link_name
from harness import Case, Point, call, sweep
from program import Ranks, Report, goal, program

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.tuning import ExchangeTuner
from fairseq_tutel.tuning.candidates import TUNABLE, build_choices

_TUNER, _WORST = 1.10, 1.2
OPTIONS = {
    "phases": (["1", "2", "4", "2", "1"], "capacity factors in order"),
    "placement": ("sliced", "of experts on ranks: replicated or sliced"),
    "steps": (120, "of a phase"),
    "repetitions": (5, "of a choice at each factor"),
    "experts": (2, "E over all ranks"),
    "tokens": (64, "of a rank"),
    "model-dim": (256, "M"),
    "hidden-dim": (384, "F"),
    "ranks-per-node": (0, "0: as the machines have it"),
    "max-loss": (0.1, "share of the time that the tuner's trials may cost"),
}


class Workload:
    """A layer and its input."""

    def __init__(self, options: argparse.Namespace):
        self.groups = build_groups(options.experts, placement=options.placement)
        self.layer = MoELayer(
            options.model_dim,
            options.experts,
            options.hidden_dim,
            top_k=min(2, options.experts),
            groups=self.groups,
            seed=1,
            exchange=ExchangeConfig(ranks_per_node=options.ranks_per_node),
        )
        torch.manual_seed(10 + self.groups.rank)
        self.x = torch.randn(options.tokens, options.model_dim, requires_grad=True)

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


def points(options: argparse.Namespace) -> Iterator[Point]:
    """All fixed choices at each factor; then, phase by phase, the tuner and the best choice."""
    work, tuned = Workload(options), Workload(options)
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
    tuner = ExchangeTuner([tuned.layer], TUNABLE, max_loss=options.max_loss)
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
        about = {"capacity_factor": factor}
        yield Point(f"phase {number}, f={factor:g}", cases, about, derive=sums)


def goals_of(results: dict[str, Any], phases: Sequence[float], steps: int) -> list[dict]:
    """Goals of all phases together."""
    derived = [of["derived"] for name, of in results.items() if name.startswith("phase")]
    if len(derived) < len(phases):
        return []
    tuner, best = (sum(of[name]["s"] for of in derived) for name in ("tuner", "best"))
    fixed = {factor: results[f"fixed, f={factor:g}"]["ms"] for factor in phases}
    totals = [
        1e-3 * steps * sum(of[name]["forward"]["p50"] for of in map(fixed.get, phases))
        for name in fixed[phases[0]]
    ]
    text = f"the tuner takes at most {_TUNER} times the best choice in hindsight"
    worst = f"at least {_WORST} times faster than the worst choice kept throughout"
    return [goal(text, tuner / best, _TUNER, True), goal(worst, max(totals) / tuner, _WORST)]


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    ranks.expect_several()
    link = link_name("loopback")
    settings = {name: getattr(options, name.replace("-", "_")) for name in OPTIONS}
    options.phases = [float(factor) for factor in options.phases]
    about = {"backend": ranks.backend, "link": link, "settings": settings}
    default = f"adaptive-{ranks.world_size}-{link}"
    goals = lambda results: goals_of(results, options.phases, options.steps)  # noqa: E731
    with Report("adaptive", ranks, options.output, default, **about) as report:
        sweep(report, points(options), ranks, options.steps, warmup=0, goals=goals)


main = program(__doc__, OPTIONS, run, backend="gloo")


if __name__ == "__main__":
    sys.exit(main())
