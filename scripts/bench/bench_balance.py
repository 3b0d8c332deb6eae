"""Time of a dropless step with busy ranks, without help and with it (``balance_ranks``).

    python -m fairseq_tutel.launch --nproc-per-node 2 --cpu-threads 1 -- \\
        python scripts/bench/bench_balance.py
    python scripts/bench/bench_balance.py --mode count
    python scripts/bench/two_nodes.py --ranks 2 -- python scripts/bench/bench_balance.py

time: forward and backward passes of a layer whose choices are given, so that the utilisation of
ranks (mean over largest load) is as stated. Rank 0 is the busy one. ``even`` has equal loads;
``experts alone`` are a rank's even rows through its experts, for the planner's formula. Good: a
helped step takes at most 1.10 times an even one, and even loads cost at most 1.02 times as much.
count: for 4 to 64 ranks and some skews, the busiest rank's rows over the mean, and the moves. Good:
at most 1.05. No ranks are needed.
"""

import argparse
import functools
import random
import sys
from collections.abc import Iterator

import torch
from harness import Case, Point, sweep
from program import CLOCK, Ranks, Report, goal, numbers, program
from record import median_ratio, ratio_of_pairs, say, table

from fairseq_tutel.distributed.balance import measured_break_even, plan_moves
from fairseq_tutel.moe import ExchangeConfig, ExpertRows, MoELayer
from fairseq_tutel.plan.balance import gain_of_help

_GOAL, _COST, _TOLERANCE, _ERROR = 1.10, 1.02, 1.05, 1.15
_SKEWS = {"uniform": 0.0, "Zipf 0.5": 0.5, "Zipf 1": 1.0, "Zipf 1.5": 1.5, "one expert": 40.0}
OPTIONS = {
    "mode": ("time", "what to measure", ("time", "count")),
    "utilisations": (numbers, "percentages of time (default: 50,62,76,88)"),
    "tokens": (4096, "per rank"),
    "model-dim": (256, "M"),
    "hidden-dim": (512, "F"),
    "experts": (8, "E, over all ranks"),
    "min-rows": (0, "balance_min_rows; 0: measured"),
    **CLOCK,
}


def choices_for(utilisation: float, tokens: int, experts: int, ranks: int) -> torch.Tensor:
    """Choices [T, 2] with which rank 0 gets so much that mean over largest load is as asked.

    Experts of a rank share its rows evenly. Neighbours in the list of pairs are different experts.
    """
    local, busy = experts // ranks, round(2 * tokens / ranks / utilisation / 2) * 2
    pair = torch.arange(2 * tokens)
    others = local + (pair - busy) % (experts - local)
    chosen = torch.where(pair < busy, pair % local, others).view(tokens, 2)
    return chosen[torch.randperm(tokens, generator=torch.Generator().manual_seed(1))]


class Work:
    """A layer, its input and given choices."""

    def __init__(self, options: argparse.Namespace, balance: bool):
        exchange = ExchangeConfig(balance_ranks=balance, balance_min_rows=options.min_rows)
        sizes = (options.model_dim, options.experts, options.hidden_dim)
        self.layer = MoELayer(*sizes, capacity_factor=0, exchange=exchange, seed=1)
        torch.manual_seed(10 + self.layer.groups.rank)
        self.x = torch.randn(options.tokens, options.model_dim, requires_grad=True)
        self.grad = torch.randn_like(self.x)
        self.aux = None

    def leaves(self):
        return [self.x, *self.layer.parameters()]

    def forward(self, choices: torch.Tensor, _: int):
        y, self.aux = self.layer(self.x, choices=choices, return_aux=True)
        return (y,), (self.grad,)

    def case(self, name: str, choices: torch.Tensor) -> Case:
        return Case(name, functools.partial(self.forward, choices), self.leaves)


def experts_alone(layer: MoELayer, rows: int) -> Case:
    """Make a case of the experts' products on rows that are spread evenly."""
    rows_RM = torch.randn(rows, layer.model_dim, requires_grad=True)
    grad_RM, local = torch.randn_like(rows_RM), layer.groups.num_local_experts
    offsets = torch.tensor([rows * (j + 1) // local for j in range(local)], dtype=torch.int32)

    def forward(_):
        return (layer.experts(ExpertRows(rows_RM, offsets)),), (grad_RM,)

    return Case("experts alone", forward, lambda: [rows_RM, *layer.experts.parameters()])


def predicted(found: dict, about: dict) -> dict[str, dict[str, float]]:
    """Return the gain by help, measured and by the planner's formula."""
    ms = {case: phases["both"]["p50"] for case, phases in found["ms"].items()}
    rows_ms = ms["experts alone"] / max(1, sum(about["loads"]) / len(about["loads"]))
    moves = about["moves_of_busiest"] * about["rows_that_pay"] * rows_ms
    busy = about["utilisation"]
    without, helped = gain_of_help(ms["even"], ms["experts alone"], moves, busy)
    gain = median_ratio(found, "not helped", "helped")
    return {"helped": {"gain": gain, "predicted": without / helped}}


def points(options: argparse.Namespace, ranks: Ranks) -> Iterator[Point]:
    """One for each utilisation: helped, not helped, and even loads with and without the option."""
    plain, helping = Work(options, False), Work(options, True)
    sizes = options.tokens, options.experts, ranks.world_size
    even = choices_for(1.0, *sizes)
    key = helping.layer.groups, torch.float32, ranks.device
    pays = options.min_rows or measured_break_even(*key, training=True)
    for percent in options.utilisations or [50, 62, 76, 88]:
        skewed = choices_for(percent / 100, *sizes)
        helping.case("", skewed).run()
        record = helping.aux.record
        rows_E = torch.bincount(skewed.flatten(), minlength=options.experts) * ranks.world_size
        moves = plan_moves(rows_E.tolist(), ranks.world_size, min_rows=pays)
        about = {
            "utilisation": percent / 100,
            "loads": record.loads_P,
            "rows_helped": sum(move.end - move.begin for move in moves),
            "moves_of_busiest": sum(move.home == 0 for move in moves),
            "rows_that_pay": pays,
            "bytes_moved": ranks.slowest([float(record.bytes_moved)])[0],
        }
        cases = [
            helping.case("helped", skewed),
            plain.case("not helped", skewed),
            plain.case("even", even),
            helping.case("even, option on", even),
            experts_alone(plain.layer, 2 * options.tokens),
        ]
        derive = functools.partial(predicted, about=about)
        yield Point(f"{percent} %", cases, about, derive=derive)


def goals_of(results: dict) -> list[dict]:
    """Time beside even loads, and what the option costs with even loads."""
    found = []
    for name, of in results.items():
        text = f"at {name} a helped step takes at most {_GOAL} times an even one"
        found.append(goal(text, of["this_over"]["even"][1], _GOAL, True))
        gain = of["derived"]["helped"]
        error = max(gain["gain"] / gain["predicted"], gain["predicted"] / gain["gain"])
        text = f"at {name} the formula predicts the gain within 15 %"
        found.append(goal(text, error, _ERROR, True))
    raw = [of["raw_ms"] for of in results.values()]
    on, off = (
        [ms for of in raw for ms in of[case]["both"]] for case in ("even, option on", "even")
    )
    if on:
        cost = ratio_of_pairs(on, off)[1]
        found.append(goal(f"even loads cost at most {_COST} times as much", cost, _COST, True))
    return found


def count(options: argparse.Namespace) -> list[dict]:
    """Rows of the busiest rank over the mean, and moves, for random choices."""
    rows = []
    for ranks in (4, 8, 16, 64):
        experts, rng = 8 * ranks, random.Random(ranks)
        for name, exponent in _SKEWS.items():
            weights = [(1 + place) ** -exponent for place in rng.sample(range(experts), experts)]
            drawn = rng.choices(range(experts), weights, k=2 * options.tokens * ranks)
            rows_E = [0] * experts
            for expert in drawn:
                rows_E[expert] += 1
            moves = plan_moves(rows_E, ranks)
            loads = [sum(rows_E[8 * p : 8 * p + 8]) for p in range(ranks)]
            mean, before = sum(loads) / ranks, max(loads)
            for move in moves:
                loads[move.home] -= move.end - move.begin
                loads[move.helper] += move.end - move.begin
            rows.append({
                "ranks": ranks, "experts": experts, "choices": name, "before": before / mean,
                "after": max(loads) / mean, "moves": len(moves),
            })  # fmt: skip
    return rows


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    if options.mode == "count":
        rows = count(options)
        worst = max(row["after"] for row in rows)
        text = f"the busiest rank has at most {_TOLERANCE} times the mean rows"
        goals = [goal(text, worst, _TOLERANCE, True)]
        with Report("balance", ranks, options.output, "balance-count") as report:
            report.finish({"results": rows, "goals": goals}, lambda found: say(table(rows)))
        return
    ranks.expect_several()
    about = {n: getattr(options, n) for n in ("tokens", "model_dim", "hidden_dim", "experts")}
    how = {"file": f"balance-{ranks.world_size}", "about": about, "goals": goals_of}
    sweep("balance", options, ranks, points(options, ranks), repetitions=9, **how)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
