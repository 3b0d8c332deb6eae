"""Experts in slices: memory of a rank, and what it costs to choose another r in every step.

    python -m fairseq_tutel.launch --nproc-per-node 4 -- python scripts/bench/bench_flows.py

Memory: of the experts' weights, gradients and Adam's statistics after one update, by placement:
their bytes, and by how much they made the resident set of the process grow.

Switching: rounds of as many steps with every r, once one r after the other ("never") and once
another r in each step ("every step"). Each step, a forward and backward pass, begins with a barrier
and lasts as long as on the slowest rank; a round's two orders follow each other, and the median of
their ratios is the cost. The first step after a change of order is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import torch
from measure import resident_bytes
from ranks import Ranks, connected
from record import OtherLoad, describe_run, device_name, quiet_logs, say, table, write_json

from fairseq_tutel.config import EXPERT_PLACEMENTS
from fairseq_tutel.distributed import ExpertParallelGroups, build_groups, possible_r
from fairseq_tutel.moe import MoELayer


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--experts", type=int, default=1, help="default: 1")
    add("--model-dim", type=int, default=256, help="default: 256")
    add("--tokens", type=int, default=256, help="of a rank (default: 256)")
    add("--hidden-dim", type=int, default=1024, help="of the layer that switches (default: 1024)")
    add("--wide", type=int, default=65536, help="hidden units where memory is measured")
    add("--rounds", type=int, default=40, help="default: 40")
    add("--steps", type=int, default=4, help="with each r in an order of a round (default: 4)")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        metavar="FOLDER",
        help="for flows-RANKS.json and .png (default: runs/bench)",
    )
    return parser.parse_args(argv)


class Step:
    """Forward and backward passes of one layer."""

    def __init__(self, options: argparse.Namespace, groups: ExpertParallelGroups, hidden_dim: int):
        self.layer = MoELayer(
            options.model_dim,
            options.experts,
            hidden_dim,
            top_k=min(2, options.experts),
            groups=groups,
            seed=1,
        )
        torch.manual_seed(10 + groups.rank)
        self.x = torch.randn(options.tokens, options.model_dim)

    def __call__(self, r: int) -> None:
        """One, with this r."""
        self.layer.zero_grad(set_to_none=True)
        self.layer(self.x, r=r).square().mean().backward()


def measure_memory(options: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """One row per placement, of the rank that holds most."""
    rows = []
    for placement in EXPERT_PLACEMENTS:
        groups = build_groups(options.experts, placement=placement)
        before = resident_bytes()
        step = Step(options, groups, options.wide)
        # tokens go to all slices: nothing is gathered that would stay in the allocator
        step(possible_r(groups)[-1])
        experts = list(step.layer.experts.parameters())
        optimizer = torch.optim.Adam(experts)
        optimizer.step()
        grown = resident_bytes() - before
        statistics_of = (value for state in optimizer.state.values() for value in state.values())
        held = {
            "weights": sum(param.nbytes for param in experts),
            "gradients": sum(param.grad.nbytes for param in experts),
            "statistics": sum(value.nbytes for value in statistics_of if value.dim()),
        }
        values = ranks.slowest([*map(float, held.values()), float(grown)])
        row = dict(zip([*held, "resident_growth"], map(int, values), strict=True))
        rows.append({"placement": placement, "slices": groups.num_slices, **row})
        del step, experts, optimizer, statistics_of
        ranks.barrier()
    return rows


def orders(choices: Sequence[int], steps: int) -> dict[str, list[int]]:
    """Both orders of the same steps."""
    return {
        "never": [r for r in choices for _ in range(steps)],
        "every step": [r for _ in range(steps) for r in choices],
    }


def measure_switching(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Seconds of each step of every round, by order, on the slowest rank."""
    groups = build_groups(options.experts, placement="sliced")
    choices, step = possible_r(groups), Step(options, groups, options.hidden_dim)
    both = orders(choices, options.steps)
    seconds: dict[str, list[list[float]]] = {name: [] for name in both}
    for number in range(-2, options.rounds):
        # by turns, as machines slow down and recover
        for name in list(both)[:: -1 if number % 2 else 1]:
            step(both[name][0])
            spent = []
            for r in both[name]:
                ranks.barrier()
                begin = time.perf_counter()
                step(r)
                spent.append(time.perf_counter() - begin)
            if number >= 0:
                seconds[name].append(ranks.slowest(spent))
    times = by_r(seconds, both)
    return {"r": choices, "orders": both, "seconds": seconds, **cost(seconds), "by_r": times}


def cost(seconds: dict[str, list[list[float]]]) -> dict[str, float]:
    """Median over rounds of the time of "every step" over that of "never", and its error."""
    ratios = [
        sum(switching) / sum(never)
        for switching, never in zip(seconds["every step"], seconds["never"], strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5  # of a median
    return {"ratio": middle, "standard_error": error}


def by_r(
    seconds: dict[str, list[list[float]]], both: dict[str, list[int]]
) -> dict[str, dict[str, float]]:
    """Median seconds of a step with each r, by order; as JSON has it, r is a text."""
    found: dict[str, dict[str, float]] = {}
    for name, rounds in seconds.items():
        times: dict[str, list[float]] = {}
        for r, spent in itertools.chain.from_iterable(
            zip(both[name], each, strict=True) for each in rounds
        ):
            times.setdefault(str(r), []).append(spent)
        found[name] = {r: statistics.median(values) for r, values in times.items()}
    return found


def show(result: dict[str, Any]) -> None:
    """The tables."""
    columns = ("weights", "gradients", "statistics", "resident_growth")
    lines = [
        [row["placement"], str(row["slices"]), *(f"{row[key] / 2**20:.1f}" for key in columns)]
        for row in result["memory"]
    ]
    say(table(["placement", "slices", *(f"{key} MiB" for key in columns)], lines))
    switching = result["switching"]
    names = list(switching["by_r"])
    lines = [
        [str(r), *(f"{1e3 * switching['by_r'][name][str(r)]:.2f}" for name in names)]
        for r in switching["r"]
    ]
    say(table(["r", *(f"switched {name}, ms" for name in names)], lines))
    ratio, error = switching["ratio"], switching["standard_error"]
    say(f"switching in every step takes {ratio:.4f} times as long as never (error {error:.4f})")


def run(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measure, print and write.

    Raises:
        ValueError: no expert is held by several ranks.
    """
    if build_groups(options.experts).num_replicas < 2:
        raise ValueError(
            f"{options.experts} experts on {ranks.world_size} ranks: none is held by several"
        )
    others, before = OtherLoad(), time.process_time()
    measured = {
        "memory": measure_memory(options, ranks),
        "switching": measure_switching(options, ranks),
    }
    siblings = ranks.cpu_seconds_of_others(time.process_time() - before)
    result = {
        **describe_run("flows", ranks.device, ranks.world_size),
        "backend": ranks.backend,
        "settings": {key: value for key, value in vars(options).items() if key != "output"},
        "cpu_share_of_others": others.share(siblings),
        **measured,
    }
    if ranks.first:
        say(f"flows: {ranks.world_size} ranks, {device_name(result)}")
        show(result)
        path = options.output / f"flows-{ranks.world_size}.json"
        write_json(result, path)
        say(f"written: {path}")
        if figures.draw(result, path.with_suffix(".png")):
            say(f"drawn: {path.with_suffix('.png')}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a wrong command line."""
    options = parse_arguments(argv)
    quiet_logs()
    try:
        with connected(torch.device("cpu"), "gloo") as ranks:
            run(options, ranks)
    except ValueError as error:
        sys.stderr.write(f"bench_flows.py: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
