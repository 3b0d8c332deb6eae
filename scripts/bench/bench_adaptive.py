"""A workload whose capacity factor changes while it trains: exchanges chosen once, or by the tuner.

    sudo python scripts/bench/two_nodes.py --ranks 4 -- python scripts/bench/bench_adaptive.py

An MoE layer takes forward and backward passes; every phase has another capacity factor, as the
dynamic workload of Tutel's paper (arXiv 2206.03382, section 2.3). First every fixed choice
(algorithm, overlap degree, r) is timed at every capacity factor: all take turns, a step begins with
a barrier and lasts as long as on the slowest rank. Then the tuner chooses while the phases go by;
after each of its steps the same step is taken once with the choice that was best in hindsight, on a
layer of its own, so that both see the same machine. What the tuner loses by trying is in its sum.
With --decided-steps follow steps of a factor for which the tuner has decided, in turn with the same
choice without a tuner: what it costs then. Whole steps differ by more than that from turn to turn,
so what a tuner adds is measured by itself, too, in the processor's time of the slowest rank: its
agreements, and the marks around a region, which one of five steps has.
"""

import argparse
import dataclasses
import functools
import itertools
import operator
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from bench_alltoall import about_ranks, interleaved, link_name
from measure import median_interval
from ranks import Ranks
from record import say, table
from runner import Report, add_defaults, command_line, words

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import StepAgreement, build_groups, sync_step
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.tuning import ExchangeTuner
from fairseq_tutel.tuning.candidates import TUNABLE, build_choices
from fairseq_tutel.tuning.search.tuner import MEASURED_EVERY
from fairseq_tutel.tuning.timer import RegionTimer

_DEFAULTS = {
    "steps": (120, "of a phase"),
    "samples": (5, "of a fixed choice at a factor"),
    "experts": (2, ""),
    "tokens": (64, "of a rank"),
    "model-dim": (256, ""),
    "hidden-dim": (384, ""),
    "ranks-per-node": (0, "0: as the machines have it"),
    "max-loss": (0.1, "of time that trials may cost"),
    "decided-steps": (0, "with a tuner that has decided, and as many without it"),
}
_SETTINGS = ("phases", "placement", *(name.replace("-", "_") for name in _DEFAULTS))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    phases = [1.0, 2.0, 4.0, 2.0, 1.0]
    add("--phases", default=phases, help="capacity factors in order", **words(float))
    add("--placement", default="sliced", choices=["replicated", "sliced"])
    add_defaults(parser, _DEFAULTS)
    folder = {"type": Path, "default": Path("runs/bench"), "metavar": "FOLDER"}
    add("--output", help="of adaptive-RANKS-LINK.json (default: runs/bench)", **folder)
    parser.set_defaults(device="cpu", backend="gloo")
    return parser.parse_args(argv)


class Workload:
    """A layer and its input."""

    def __init__(self, options: argparse.Namespace):
        groups = build_groups(options.experts, placement=options.placement)
        self.layer = MoELayer(
            options.model_dim,
            options.experts,
            options.hidden_dim,
            top_k=min(2, options.experts),
            groups=groups,
            seed=1,
            exchange=ExchangeConfig(ranks_per_node=options.ranks_per_node),
        )
        torch.manual_seed(10 + groups.rank)
        self.x = torch.randn(options.tokens, options.model_dim, requires_grad=True)

    def step(self, factor: float, **how) -> None:
        """One forward and backward pass, with arguments for the layer's call."""
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        y = self.x + self.layer(self.x, capacity_factor=factor, **how)
        y.square().mean().backward()

    def agree(
        self, num_tokens: int, dtype: torch.dtype, *, capacity_factor: float, exchange
    ) -> StepAgreement:
        """That of a step without a tuner, on an exchange."""
        how = {"capacity_factor": capacity_factor, "exchange": exchange}
        settings = self.layer.step_settings(dtype, **how)
        step = sync_step(num_tokens, settings, self.layer.groups)
        return dataclasses.replace(step, exchange=exchange)


def fixed_choices(layer: MoELayer) -> dict[str, ExchangeConfig]:
    """Everything that the tuner can choose, by name."""
    axes = build_choices([layer], TUNABLE)
    products = itertools.product(*(axis.values for axis in axes))
    values = [dict(zip((a.name for a in axes), product, strict=True)) for product in products]
    simplest = {axis.name: axis.values[0] for axis in axes}
    values += [{**simplest, axis.name: value} for axis in axes for value in axis.standalone]
    choices = [dataclasses.replace(layer.exchange_config, **each) for each in values]
    return {name_of(choice): choice for choice in choices}


def name_of(choice: ExchangeConfig) -> str:
    """As in "2dh x4 r=2"."""
    return f"{choice.algorithm} x{choice.overlap_degree} r={choice.r}"


def timed(ranks: Ranks, step: Callable[[], Any]) -> float:
    """Seconds of a step that all ranks begin together, on this rank."""
    ranks.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure_fixed(work: Workload, choices, options, ranks: Ranks) -> dict[str, dict[float, float]]:
    """Median seconds of every choice at every capacity factor, on the slowest rank."""
    factors = sorted(set(options.phases))
    variants = {
        (name, factor): functools.partial(work.step, factor, exchange=choice)
        for name, choice in choices.items()
        for factor in factors
    }
    seconds = interleaved(variants, ranks, options.samples, warmup=1)
    median = {turn: statistics.median(times) for turn, times in seconds.items()}
    return {name: {factor: median[name, factor] for factor in factors} for name in choices}


def best_choices(fixed: dict[str, dict[float, float]], phases: Sequence[float]) -> dict[float, str]:
    """The fastest fixed choice by capacity factor."""
    return {f: min(fixed, key=lambda name: fixed[name][f]) for f in set(phases)}  # noqa: B023


def measure_tuned(
    reference: Workload, best: dict[float, ExchangeConfig], options, ranks: Ranks
) -> dict[str, list]:
    """Seconds and choice of every step of the tuner, and seconds of the best choice beside it."""
    work = Workload(options)
    tuner = ExchangeTuner([work.layer], TUNABLE, max_loss=options.max_loss)
    mine, beside, chosen = [], [], []

    def tuned_step(factor):
        step = tuner.agree(len(work.x), work.x.dtype, capacity_factor=factor)
        chosen.append(step.exchange)
        work.step(factor, step=step)

    for factor in itertools.chain(*([factor] * options.steps for factor in options.phases)):
        mine.append(timed(ranks, functools.partial(tuned_step, factor)))
        fixed = functools.partial(reference.step, factor, exchange=best[factor])
        beside.append(timed(ranks, fixed))
    found = {"tuner": ranks.slowest(mine), "best": ranks.slowest(beside)}
    found["choices"] = [name_of(choice) for choice in chosen]
    alone = functools.partial(reference.agree, exchange=chosen[-1])
    agreeing = {"tuner": (work, tuner.agree), "alone": (reference, alone)}
    return found | measure_decided(agreeing, options, ranks)


def measure_decided(
    agreeing: dict[str, tuple[Workload, Callable[..., StepAgreement]]], options, ranks: Ranks
) -> dict[str, Any]:
    """Seconds of steps at the last factor, and of the processor in their agreements; steps in which
    the tuner tried something again.
    """
    seconds, agreements, chosen = ({name: [] for name in agreeing} for _ in range(3))

    def step(name):
        work, agree = agreeing[name]
        begin = time.thread_time()
        agreed = agree(len(work.x), work.x.dtype, capacity_factor=options.phases[-1])
        agreements[name].append(time.thread_time() - begin)
        chosen[name].append(agreed.exchange)
        work.step(options.phases[-1], step=agreed)

    for number in range(options.decided_steps):
        for name in sorted(agreeing, reverse=number % 2 == 0):  # who is first changes
            seconds[name].append(timed(ranks, functools.partial(step, name)))
    return {
        "decided": {name: ranks.slowest(times) for name, times in seconds.items()},
        "agreements": {name: ranks.slowest(times) for name, times in agreements.items()},
        "regions": {
            name: ranks.slowest(times)
            for name, times in time_regions(options.decided_steps).items()
        },
        "tried again": sum(map(operator.ne, *chosen.values())),
    }


def time_regions(turns: int) -> dict[str, list[float]]:
    """Seconds of the processor for a region with nothing in it, with a timer and without."""
    found: dict[str, list[float]] = {"tuner": [], "alone": []}
    x = torch.ones(1, requires_grad=True)
    for name, times in itertools.chain.from_iterable([found.items()] * turns):
        timer = RegionTimer() if name == "tuner" else None
        begin = time.thread_time()
        inside, span = (x, None) if timer is None else timer.begin(x)
        y = inside * 1
        (y if timer is None else timer.end(y, span)).backward()
        times.append(time.thread_time() - begin)
    return found


def cost_of_deciding(tuned: dict[str, Any]) -> dict[str, tuple[float, float, float]] | None:
    """Of a tuner that has decided, with intervals: a step over the same without it, and what it
    adds to one, in microseconds of the processor and as a part of the step.
    """
    if not tuned["decided"]["tuner"]:
        return None

    def added(name):
        pairs = zip(tuned[name]["tuner"], tuned[name]["alone"], strict=True)
        return median_interval([1e6 * (mine - alone) for mine, alone in pairs])

    steps = tuned["decided"]
    agreement, region = added("agreements"), added("regions")
    total = [a + r / MEASURED_EVERY for a, r in zip(agreement, region, strict=True)]
    step = 1e6 * statistics.median(steps["alone"])
    return {
        "steps": median_interval([a / b for a, b in zip(*steps.values(), strict=True)]),
        "agreement_us": agreement,
        "region_us": region,
        "part": tuple(each / step for each in total),
    }


def by_phase(tuned: dict[str, list], phases: Sequence[float], steps: int) -> list[dict[str, Any]]:
    """One row per phase: sums of seconds, and the choice that the tuner ended with."""
    rows = []
    for number, factor in enumerate(phases):
        part = slice(number * steps, (number + 1) * steps)
        sums = {key: sum(tuned[key][part]) for key in ("tuner", "best")}
        last = {"ratio": sums["tuner"] / sums["best"], "choice": tuned["choices"][part][-1]}
        rows.append({"capacity_factor": factor, **sums, **last})
    return rows


def runs_of(names: Sequence[str]) -> list[str]:
    """Equal neighbours in a word: "linear x1 r=1 for 20 steps"."""
    return [f"{name} for {len(list(same))} steps" for name, same in itertools.groupby(names)]


def run(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measure, print and write.

    Raises:
        ValueError: a single rank, or sizes that do not fit.
    """
    ranks.expect_several()
    link = link_name("loopback")
    path = options.output / f"adaptive-{ranks.world_size}-{link}.json"
    settings = {name: getattr(options, name) for name in _SETTINGS}
    report = Report("adaptive", ranks, path, backend=ranks.backend, link=link, settings=settings)
    reference = Workload(options)
    choices = fixed_choices(reference.layer)
    fixed = measure_fixed(reference, choices, options, ranks)
    best = best_choices(fixed, options.phases)
    in_hindsight = {factor: choices[name] for factor, name in best.items()}
    tuned = measure_tuned(reference, in_hindsight, options, ranks)
    total = {key: sum(tuned[key]) for key in ("tuner", "best")}
    totals = {
        name: options.steps * sum(map(times.get, options.phases)) for name, times in fixed.items()
    }
    whole = {
        "fixed": fixed,
        "fixed_totals": totals,
        "best_choices": best,
        "phases": by_phase(tuned, options.phases, options.steps),
        "total": total,
        "ratios": {
            "tuner/best": total["tuner"] / total["best"],
            "worst/tuner": max(totals.values()) / total["tuner"],
            "best fixed/tuner": min(totals.values()) / total["tuner"],
        },
        "deciding": cost_of_deciding(tuned),
        "tuned": {**tuned, "choices": runs_of(tuned["choices"])},
    }
    return report.finish(whole, show)


def show(result: dict[str, Any]) -> None:
    """The tables."""
    say(about_ranks(result))
    rows = [
        {
            "name": name,
            "all": result["fixed_totals"][name],
            **{f"f={f:g}": 1e3 * s for f, s in of.items()},
        }
        for name, of in result["fixed"].items()
    ]
    factors = {f"ms at {key}": f"{{{key}:.1f}}" for key in rows[0] if key.startswith("f=")}
    say(table(rows, {"choice": "{name}", **factors, "all phases, s": "{all:.1f}"}))
    shown = {
        "f": "{capacity_factor:g}",
        "tuner s": "{tuner:.2f}",
        "best s": "{best:.2f}",
        "ratio": "{ratio:.3f}",
        "tuner's last choice": "{choice}",
        "best choice": lambda row: result["best_choices"][row["capacity_factor"]],
    }
    say(table(result["phases"], shown))
    for name, ratio in result["ratios"].items():
        say(f"{name}: {ratio:.3f}")
    if deciding := result["deciding"]:
        intervals = {name: f"{m:.4g} ({low:.4g} to {high:.4g})"
                     for name, (low, m, high) in deciding.items()}  # fmt: skip
        say(f"a decided tuner/its choice alone: {intervals['steps']}")
        say(f"it adds to the processor's time of a step: {intervals['agreement_us']} us, and "
            f"{intervals['region_us']} us every {MEASURED_EVERY} steps")  # fmt: skip
        say(f"as a part of the step: {intervals['part']}")


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
