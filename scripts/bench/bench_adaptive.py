"""A workload whose capacity factor changes while it trains: exchanges chosen once, or by the tuner.

    sudo python scripts/bench/two_nodes.py --ranks 4 -- python scripts/bench/bench_adaptive.py

A stack of MoE layers takes forward and backward passes; every phase has another capacity factor, as
the dynamic workload of Tutel's paper (arXiv 2206.03382, section 2.3). First every fixed choice
(algorithm, overlap degree, r) is timed at every capacity factor: all take turns, a step begins with
a barrier and lasts as long as on the slowest rank. Then the tuner chooses while the phases go by;
after each of its steps the same step is taken once with the choice that was best in hindsight, on a
stack of its own, so that both see the same machine. What the tuner loses by trying is in its sum.
Last, a tuner that has closed takes turns with its choice fixed: what tuning costs that is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import torch
from bench_exchange import link_name
from ranks import Ranks, connected
from record import OtherLoad, describe_run, device_name, quiet_logs, say, table, write_json
from torch import nn

from fairseq_tutel import hosts
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.hosts.exchange_choices import TUNABLE, build_choices
from fairseq_tutel.moe import MoELayer


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    factors = {"type": lambda text: [float(word) for word in text.split(",")], "metavar": "LIST"}
    add("--phases", default=[1.0, 2.0, 4.0, 2.0, 1.0], help="capacity factors in order", **factors)
    add("--steps", type=int, default=120, help="of a phase (default: 120)")
    add("--samples", type=int, default=5, help="of a fixed choice at a factor (default: 5)")
    add("--closed-steps", type=int, default=200, help="of a closed tuner (default: 200)")
    add("--placement", default="sliced", choices=["replicated", "sliced"])
    add("--layers", type=int, default=1, help="default: 1")
    add("--experts", type=int, default=2, help="default: 2")
    add("--tokens", type=int, default=64, help="of a rank (default: 64)")
    add("--model-dim", type=int, default=256, help="default: 256")
    add("--hidden-dim", type=int, default=384, help="default: 384")
    add("--ranks-per-node", type=int, default=0, help="default: as the machines have it")
    add("--max-loss", type=float, default=0.1, help="of time that trials may cost (default: 0.1)")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        metavar="FOLDER",
        help="for adaptive-RANKS-LINK.json and .png (default: runs/bench)",
    )
    return parser.parse_args(argv)


class Stack:
    """MoE layers one after the other, each beside a residual."""

    def __init__(self, options: argparse.Namespace):
        groups = build_groups(options.experts, placement=options.placement)
        self.layers = nn.ModuleList(
            MoELayer(
                options.model_dim,
                options.experts,
                options.hidden_dim,
                top_k=min(2, options.experts),
                groups=groups,
                seed=1 + number,
                exchange=ExchangeConfig(ranks_per_node=options.ranks_per_node),
            )
            for number in range(options.layers)
        )
        torch.manual_seed(10 + groups.rank)
        self.x = torch.randn(options.tokens, options.model_dim, requires_grad=True)

    def step(self, factor: float, **how) -> None:
        """One forward and backward pass, with arguments for the layers' calls."""
        self.layers.zero_grad(set_to_none=True)
        self.x.grad, y = None, self.x
        for layer in self.layers:
            y = y + layer(y, capacity_factor=factor, **how)
        y.square().mean().backward()


class Tuned:
    """A stack whose exchanges a tuner chooses.

    Attributes:
        choice: of the last step.
    """

    def __init__(self, stack: Stack, options: argparse.Namespace):
        self.stack = stack
        self.tuner = hosts.ExchangeTuner(list(stack.layers), TUNABLE, max_loss=options.max_loss)
        self.choice = stack.layers[0].exchange_config

    def step(self, factor: float) -> None:
        """One forward and backward pass as the tuner wants it."""
        x = self.stack.x
        step = self.tuner.agree(len(x), x.dtype, capacity_factor=factor)
        self.choice = step.exchange
        self.stack.step(factor, step=step)


def fixed_choices(stack: Stack) -> list[ExchangeConfig]:
    """Everything that the tuner can choose, built for a stack."""
    axes, serves = build_choices(list(stack.layers), TUNABLE)
    values = [{}]
    for axis in axes:
        values = [{**known, axis.name: value} for known in values for value in axis.values]
    simplest = {axis.name: axis.values[0] for axis in axes}
    values += [{**simplest, axis.name: value} for axis in axes for value in axis.apart]
    base = stack.layers[0].exchange_config
    choices = [dataclasses.replace(base, **each) for each in values]
    # where an algorithm does not fit the nodes of an r, another would take its place
    return [choice for choice in choices if serves.get((choice.algorithm, choice.r), True)]


def name_of(choice: ExchangeConfig) -> str:
    """As in "2dh x4 r=2"."""
    return f"{choice.algorithm} x{choice.overlap_degree} r={choice.r}"


def timed(ranks: Ranks, step: Callable[[], Any]) -> float:
    """Seconds of a step that all ranks begin together, on this rank."""
    ranks.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure_fixed(stack: Stack, choices, options, ranks: Ranks) -> dict[str, dict[float, float]]:
    """Median seconds of every choice at every capacity factor, on the slowest rank."""
    factors = sorted(set(options.phases))
    seconds: dict[tuple[str, float], list[float]] = {}
    for number in range(-1, options.samples):  # once to connect
        turns = [(choice, factor) for choice in choices for factor in factors]
        for choice, factor in random.Random(number).sample(turns, len(turns)):
            spent = timed(ranks, lambda c=choice, f=factor: stack.step(f, exchange=c))
            if number >= 0:
                seconds.setdefault((name_of(choice), factor), []).append(spent)
    median = {key: statistics.median(ranks.slowest(times)) for key, times in seconds.items()}
    return {
        name_of(choice): {factor: median[name_of(choice), factor] for factor in factors}
        for choice in choices
    }


@dataclass
class Summary:
    """What the fixed choices say about a sequence of phases.

    Attributes:
        best: choice by capacity factor, the fastest one there.
        totals: seconds of each fixed choice over all phases, by its medians.
    """

    best: dict[float, str]
    totals: dict[str, float]

    @classmethod
    def of(cls, fixed: dict[str, dict[float, float]], phases: Sequence[float], steps: int):
        """Of medians by choice and factor."""
        best = {f: min(fixed, key=lambda name, f=f: fixed[name][f]) for f in set(phases)}
        totals = {name: steps * sum(times[f] for f in phases) for name, times in fixed.items()}
        return cls(best, totals)


def measure_tuned(tuned, reference: Stack, best, options, ranks: Ranks) -> dict[str, list]:
    """Seconds and choice of every step of the tuner, and seconds of the best choice beside it."""
    mine, beside, chosen = [], [], []
    for factor in options.phases:
        for _ in range(options.steps):
            mine.append(timed(ranks, lambda f=factor: tuned.step(f)))
            chosen.append(name_of(tuned.choice))
            beside.append(timed(ranks, lambda f=factor: reference.step(f, exchange=best[f])))
    return {"tuner": ranks.slowest(mine), "best": ranks.slowest(beside), "choices": chosen}


def measure_closed(tuned, reference: Stack, factor: float, options, ranks: Ranks) -> dict[str, Any]:
    """Seconds of steps of a tuner that has decided, and of its choice without a tuner."""
    seconds: dict[str, list[float]] = {"closed": [], "fixed": []}
    tuned.step(factor)
    choice = tuned.choice
    for number in range(options.closed_steps):
        turns = {
            "closed": lambda: tuned.step(factor),
            "fixed": lambda: reference.step(factor, exchange=choice),
        }
        for name in random.Random(number).sample(list(turns), 2):
            seconds[name].append(timed(ranks, turns[name]))
    slowest = {name: ranks.slowest(times) for name, times in seconds.items()}
    ratios = [a / b for a, b in zip(slowest["closed"], slowest["fixed"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5  # of a median
    return {**slowest, "ratio": middle, "standard_error": error, "choice": name_of(choice)}


def by_phase(tuned: dict[str, list], phases: Sequence[float], steps: int) -> list[dict[str, Any]]:
    """One row per phase: sums of seconds, and the choice that the tuner ended with."""
    rows = []
    for number, factor in enumerate(phases):
        part = slice(number * steps, (number + 1) * steps)
        spent, best = sum(tuned["tuner"][part]), sum(tuned["best"][part])
        rows.append(
            {
                "capacity_factor": factor,
                "tuner": spent,
                "best": best,
                "ratio": spent / best,
                "choice": tuned["choices"][part][-1],
            }
        )
    return rows


def runs_of(names: Sequence[str]) -> list[str]:
    """Equal neighbours in a word: "linear x1 r=1 for 20 steps"."""
    groups = ((name, len(list(same))) for name, same in itertools.groupby(names))
    return [f"{name} for {number} step{'s'[: number != 1]}" for name, number in groups]


def run(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measure, print and write.

    Raises:
        ValueError: a single rank, or sizes that do not fit.
    """
    if ranks.world_size < 2:
        raise ValueError("an exchange needs at least 2 ranks: see two_nodes.py --help")
    others, before = OtherLoad(), time.process_time()
    tuned, reference = Tuned(Stack(options), options), Stack(options)
    choices = fixed_choices(reference)
    fixed = measure_fixed(reference, choices, options, ranks)
    summary = Summary.of(fixed, options.phases, options.steps)
    by_name = {name_of(choice): choice for choice in choices}
    best = {factor: by_name[name] for factor, name in summary.best.items()}
    measured = measure_tuned(tuned, reference, best, options, ranks)
    closed = measure_closed(tuned, reference, options.phases[0], options, ranks)
    siblings = ranks.cpu_seconds_of_others(time.process_time() - before)
    total = {key: sum(measured[key]) for key in ("tuner", "best")}
    worst = max(summary.totals.values())
    result = {
        **describe_run("adaptive", ranks.device, ranks.world_size),
        "backend": ranks.backend,
        "link": link_name(),
        "settings": {key: value for key, value in vars(options).items() if key != "output"},
        "cpu_share_of_others": others.share(siblings),
        "fixed": fixed,
        "fixed_totals": summary.totals,
        "best_choices": summary.best,
        "phases": by_phase(measured, options.phases, options.steps),
        "total": total,
        "ratios": {
            "tuner/best": total["tuner"] / total["best"],
            "worst/tuner": worst / total["tuner"],
            "best fixed/tuner": min(summary.totals.values()) / total["tuner"],
        },
        "closed": closed,
        "tuned": {**measured, "choices": runs_of(measured["choices"])},
    }
    if bed := os.environ.get("TWO_NODES"):
        result["command"] = f"{bed} -- {result['command']}"
    return result


def show(result: dict[str, Any]) -> None:
    """The tables."""
    factors = sorted({row["capacity_factor"] for row in result["phases"]})
    rows = [
        [name, *(f"{1e3 * times[f]:.1f}" for f in factors), f"{result['fixed_totals'][name]:.1f}"]
        for name, times in result["fixed"].items()
    ]
    say(table(["choice, ms at f =", *(f"{f:g}" for f in factors), "all phases, s"], rows))
    rows = [
        [f"{row['capacity_factor']:g}", f"{row['tuner']:.2f}", f"{row['best']:.2f}",
         f"{row['ratio']:.3f}", row["choice"], result["best_choices"][row["capacity_factor"]]]
        for row in result["phases"]
    ]  # fmt: skip
    say(table(["f", "tuner s", "best s", "ratio", "tuner's last choice", "best choice"], rows))
    for name, ratio in result["ratios"].items():
        say(f"{name}: {ratio:.3f}")
    closed = result["closed"]
    ratio, error = closed["ratio"], closed["standard_error"]
    say(f"closed tuner over its choice fixed: {ratio:.4f} +- {error:.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a wrong command line."""
    options = parse_arguments(argv)
    quiet_logs()
    try:
        with connected(torch.device("cpu"), "gloo") as ranks:
            result = run(options, ranks)
            if ranks.first:
                say(f"{ranks.world_size} ranks, {result['link']}, {device_name(result)}")
                show(result)
                path = options.output / f"adaptive-{ranks.world_size}-{result['link']}.json"
                write_json(result, path)
                say(f"written: {path}")
                if figures.draw(result, path.with_suffix(".png")):
                    say(f"drawn: {path.with_suffix('.png')}")
    except ValueError as error:
        sys.stderr.write(f"bench_adaptive.py: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
