"""Time of a dropless step with busy ranks, without help and with it (``balance_ranks``).

    python -m fairseq_tutel.launch --nproc-per-node 2 -- \\
        python scripts/bench/bench_balance.py --threads 1
    python scripts/bench/bench_balance.py --mode count
    python scripts/bench/two_nodes.py --ranks 2 -- python scripts/bench/bench_balance.py

time: forward and backward passes of a layer whose choices are given, so that the utilisation of
ranks (mean over largest load) is as stated. Rank 0 is the busy one. ``even`` has equal loads.
``experts alone`` (a rank's even rows through its experts) and ``link`` (a row per token) are the
speeds of the planner's formula. ``counts alone`` are exchanged in a step, or gathered for a plan.
Good: a helped step takes at most 1.10 times an even one, a plan without moves costs at most 2 % of
it, and the formula is right within 15 %.
count: for 4 to 64 ranks and some skews, the busiest rank's rows over the mean, and the moves. Good:
at most 1.05. No ranks are needed.
"""

import argparse
import functools
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from harness import Case, Point, call, sweep
from program import CLOCK, Ranks, Report, goal, numbers, program
from record import median_ratio, say, table

from fairseq_tutel.distributed.balance import (
    BalancePlan,
    gather_counts,
    measured_break_even,
    plan_step,
    rows_while_travelling,
)
from fairseq_tutel.moe import ExchangeConfig, ExpertRows, MoELayer
from fairseq_tutel.plan.balance import LayerSpeeds

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


def experts_alone(layer: MoELayer, rows: int, *, one_rank: bool) -> Case:
    """Make a case of the experts' products: of all ranks, or of rank 0 while the others wait."""
    rows = 0 if one_rank and layer.groups.rank else rows
    rows_RM = torch.randn(rows, layer.model_dim, requires_grad=True)
    grad_RM, local = torch.randn_like(rows_RM), layer.groups.num_local_experts
    offsets = torch.tensor([rows * (j + 1) // local for j in range(local)], dtype=torch.int32)

    def forward(_):
        return (layer.experts(ExpertRows(rows_RM, offsets)),), (grad_RM,)

    name = f"experts alone, {'rank 0' if one_rank else 'all ranks'}"
    return Case(name, forward, lambda: [rows_RM, *layer.experts.parameters()])


def link_alone(layer: MoELayer, rows: int, *, both_ways: bool) -> Case:
    """Make a case of one exchange: ranks 2i send rows to ranks 2i + 1, or each to the other."""
    groups, rank = layer.groups, layer.groups.ep_rank
    sent_P, got_P = [0] * groups.ep_size, [0] * groups.ep_size
    if (partner := rank ^ 1) < groups.ep_size:
        sent_P[partner] = rows * (both_ways or rank % 2 == 0)
        got_P[partner] = rows * (both_ways or rank % 2 == 1)
    sent_RM, got_RM = (torch.ones(sum(n), layer.model_dim) for n in (sent_P, got_P))

    def exchange():
        dist.all_to_all_single(got_RM, sent_RM, got_P, sent_P, group=groups.ep_group)

    return Case(f"link, {'both ways' if both_ways else 'one way'}", call(exchange))


def counts_alone(layer: MoELayer, choices: torch.Tensor) -> list[Case]:
    """Make cases of what a step does with its counts: exchange them, or gather them and plan."""
    groups, exchange = layer.groups, layer.exchange.algorithm
    count_E = choices.flatten().bincount(minlength=groups.num_experts)

    def plan():
        plan_step(gather_counts(count_E, groups)).chunks(groups.ep_rank, 1)

    shared = call(lambda: exchange.share_chunks(count_E, 1))
    return [Case("counts alone", shared), Case("counts and plan alone", call(plan))]


class Formula:
    """Counts of the planner's formula for one utilisation.

    Args:
        layer: its experts and sizes.
        even, skewed: choices [T, 2], those of every rank.
        pays: rows that pay for a move.
    """

    def __init__(self, layer: MoELayer, even: torch.Tensor, skewed: torch.Tensor, pays: int):
        groups = layer.groups
        counts = [
            choices.flatten().bincount(minlength=groups.num_experts).expand(groups.ep_size, -1)
            for choices in (even, skewed)
        ]
        numbers = sum(param.numel() for param in layer.experts.parameters())
        numbers //= groups.num_local_experts
        travel = rows_while_travelling(pays, layer.model_dim, numbers)
        self.even, self.alone = map(BalancePlan, counts)
        self.helped = plan_step(counts[1], min_rows=pays, travel=travel)
        self.tokens, self.rows_of_expert = len(even), numbers / layer.model_dim

    def about(self) -> dict:
        """Return the counts for the record."""
        plans = {"even": self.even, "not helped": self.alone, "helped": self.helped}
        return {
            "moves": self.helped.moves,
            "loads": {name: plan.load_P for name, plan in plans.items()},
            "links": {name: plan.links_P2.tolist() for name, plan in plans.items()},
        }

    def gain(self, found: dict) -> dict[str, dict[str, float]]:
        """Return the gain by help, measured and predicted, from the record of the times."""
        ms = {
            case: phases.get("both", phases["forward"])["p50"]
            for case, phases in found["ms"].items()
        }
        # a link is timed with a row per token; a step has four exchanges
        one_way, both_ways = ms["link, one way"] / self.tokens, ms["link, both ways"] / self.tokens
        row, row_alone = (
            ms[f"experts alone, {who}"] / (3 * 2 * self.tokens) for who in ("all ranks", "rank 0")
        )
        move = one_way * self.rows_of_expert
        speeds = LayerSpeeds(row, row_alone, 4 * one_way, 4 * both_ways, move)
        rest = ms["even"] - speeds.seconds(self.even)
        without, helped = (rest + speeds.seconds(plan) for plan in (self.alone, self.helped))
        gain = median_ratio(found, "not helped", "helped")
        return {"helped": {"gain": gain, "predicted": without / helped}}


def points(options: argparse.Namespace, ranks: Ranks) -> Iterator[Point]:
    """One for each utilisation: helped, not helped, and even loads with and without the option."""
    plain, helping = Work(options, False), Work(options, True)
    layer, sizes = plain.layer, (options.tokens, options.experts, ranks.world_size)
    even = choices_for(1.0, *sizes)
    key = layer.groups, torch.float32, ranks.device
    pays = options.min_rows or measured_break_even(*key, training=True)
    for percent in options.utilisations or [50, 62, 76, 88]:
        skewed = choices_for(percent / 100, *sizes)
        formula = Formula(layer, even, skewed, pays)
        helping.case("", skewed).run()
        record = helping.aux.record
        if record.loads_P != formula.helped.load_P:
            raise RuntimeError(f"the layer has loads {record.loads_P}, not those of its plan")
        about = {"utilisation": percent / 100, "rows_that_pay": pays, **formula.about()}
        about["bytes_moved"] = ranks.slowest([float(record.bytes_moved)])[0]
        cases = [
            helping.case("helped", skewed),
            plain.case("not helped", skewed),
            plain.case("even", even),
            helping.case("even, option on", even),
            experts_alone(layer, 2 * options.tokens, one_rank=False),
            experts_alone(layer, 2 * options.tokens, one_rank=True),
            link_alone(layer, options.tokens, both_ways=False),
            link_alone(layer, options.tokens, both_ways=True),
            *counts_alone(layer, even),
        ]
        yield Point(f"{percent} %", cases, about, derive=formula.gain)


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
        even, before, after = (
            of["ms"][case].get("both", of["ms"][case]["forward"])["p50"]
            for case in ("even", "counts alone", "counts and plan alone")
        )
        text = f"at {name} the plan costs even loads at most 2 % of a step"
        found.append(goal(text, 1 + (after - before) / even, _COST, True))
    return found


def count(options: argparse.Namespace) -> list[dict]:
    """Rows of the busiest rank over the mean, and moves, for random choices."""
    rows = []
    for ranks in (4, 8, 16, 64):
        experts, rng = 8 * ranks, torch.Generator().manual_seed(ranks)
        for name, exponent in _SKEWS.items():
            weight_E = (1.0 + torch.randperm(experts, generator=rng)) ** -exponent
            drawn = weight_E.multinomial(2 * options.tokens * ranks, True, generator=rng)
            count_PE = [of.bincount(minlength=experts) for of in drawn.chunk(ranks)]
            home = BalancePlan(torch.stack(count_PE))
            plan = plan_step(torch.stack(count_PE))
            before, after = (max(each.load_P) / (2 * options.tokens) for each in (home, plan))
            rows.append({
                "ranks": ranks, "experts": experts, "choices": name, "before": before,
                "after": after, "moves": len(plan.moves),
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
    how = {"file": f"balance-{ranks.world_size}", "about": about, "goals": goals_of, "warmup": 1}
    sweep("balance", options, ranks, points(options, ranks), repetitions=9, **how)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
