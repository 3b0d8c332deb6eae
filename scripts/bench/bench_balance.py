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

import dataclasses
import functools
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from harness import Case, Goal, Point, call, sweep
from layers import SIZES, Inputs, LayerShape, make_layer, with_sizes
from program import CLOCK, numbers, program
from record import median_ratio

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed.balance import (
    BalancePlan,
    gather_counts,
    measured_break_even,
    plan_step,
    rows_while_travelling,
)
from fairseq_tutel.moe import ExpertRows, MoELayer
from fairseq_tutel.plan.balance import LayerSpeeds

_SHAPE = LayerShape(4096, 256, 512, experts=8, capacity_factor=0.0)
_SKEWS = {"uniform": 0.0, "Zipf 0.5": 0.5, "Zipf 1": 1.0, "Zipf 1.5": 1.5, "one expert": 40.0}
GOALS = [
    Goal("helped", "over even", 1.10, at_most=True),
    Goal("helped", "formula's error", 1.15, at_most=True),
    Goal("counts and plan alone", "its cost over even", 0.02, at_most=True),
]
OPTIONS = {
    "mode": ("time", "what to measure", ("time", "count")),
    "utilisations": (numbers, "percentages of time (default: 50,62,76,88)"),
    **{name: SIZES[name] for name in ("tokens", "model-dim", "hidden-dim", "experts")},
    "min-rows": (0, "balance_min_rows; 0: measured"),
    **CLOCK,
}


def choices_for(utilisation: float, tokens: int, experts: int, ranks: int) -> torch.Tensor:
    """Return choices [T, 2] that give rank 0 so much that mean over largest load is as asked.

    Experts of a rank share its rows evenly. Neighbours in the list of pairs are different experts.
    """
    local, busy = experts // ranks, round(2 * tokens / ranks / utilisation / 2) * 2
    pair = torch.arange(2 * tokens)
    others = local + (pair - busy) % (experts - local)
    chosen = torch.where(pair < busy, pair % local, others).view(tokens, 2)
    return chosen[torch.randperm(tokens, generator=torch.Generator().manual_seed(1))]


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

    def exchange(_):
        dist.all_to_all_single(got_RM, sent_RM, got_P, sent_P, group=groups.ep_group)

    return Case(f"link, {'both ways' if both_ways else 'one way'}", call(exchange))


def counts_alone(layer: MoELayer, count_E: torch.Tensor) -> list[Case]:
    """Make cases of what a step does with its counts: exchange them, or gather them and plan."""
    groups, algorithm = layer.groups, layer.exchange.algorithm

    def plan(_):
        plan_step(gather_counts(count_E, groups)).chunks(groups.ep_rank, 1)

    shared = call(lambda _: algorithm.share_chunks(count_E, 1))
    return [Case("counts alone", shared), Case("counts and plan alone", call(plan))]


def derive(found, plans: dict[str, BalancePlan], shape: LayerShape, weights: float):
    """Return the gain by help, measured and by the planner's formula, and what the plan costs.

    Args:
        plans: ``even``, ``not helped`` and ``helped``, from the counts of all ranks.
        weights: numbers of an expert.
    """
    ms = {name: of.get("both", of["forward"])["p50"] for name, of in found["ms"].items()}
    # a link is timed with a row per token; a step has four exchanges
    one_way, both_ways = (ms[f"link, {which}"] / shape.tokens for which in ("one way", "both ways"))
    row, row_alone = (
        ms[f"experts alone, {who}"] / (3 * 2 * shape.tokens) for who in ("all ranks", "rank 0")
    )
    move = one_way * weights / shape.model_dim
    speeds = LayerSpeeds(row, row_alone, 4 * one_way, 4 * both_ways, move)
    seconds = {name: speeds.seconds(plan) for name, plan in plans.items()}
    rest = ms["even"] - seconds["even"]
    predicted = (rest + seconds["not helped"]) / (rest + seconds["helped"])
    gain = median_ratio(found, "not helped", "helped")
    error = max(gain / predicted, predicted / gain)
    even = median_ratio(found, "helped", "even")
    cost = (ms["counts and plan alone"] - ms["counts alone"]) / ms["even"]
    helped = {"gain": gain, "predicted": predicted, "over even": even, "formula's error": error}
    return {"helped": helped, "counts and plan alone": {"its cost over even": cost}}


def time_points(options, ranks) -> Iterator[Point]:
    """Yield for each utilisation: helped, not helped, even loads with and without the option."""
    shape = with_sizes(_SHAPE, options)
    inputs = Inputs(shape, ranks.device, options.seed, ranks.rank)
    exchange = ExchangeConfig(balance_ranks=True, balance_min_rows=options.min_rows)
    plain = make_layer(shape, ranks.device)
    helping = make_layer(shape, ranks.device, exchange=exchange)
    groups, sizes = plain.groups, (shape.tokens, shape.experts, ranks.world_size)
    pays = options.min_rows or measured_break_even(
        groups, torch.float32, ranks.device, training=True
    )
    weights = sum(param[0].numel() for param in plain.experts.parameters())
    travel = rows_while_travelling(pays, shape.model_dim, weights)

    def case(name, layer, choices):
        return inputs.case(name, lambda x: layer(x, choices=choices), layer.parameters())

    def counts(choices):
        return choices.flatten().bincount(minlength=shape.experts)

    even = choices_for(1.0, *sizes)
    for percent in options.utilisations or [50, 62, 76, 88]:
        skewed = choices_for(percent / 100, *sizes)
        even_PE, skewed_PE = (counts(each).expand(groups.ep_size, -1) for each in (even, skewed))
        plans = {"even": BalancePlan(even_PE), "not helped": BalancePlan(skewed_PE)}
        plans["helped"] = plan_step(skewed_PE, min_rows=pays, travel=travel)
        record = helping(inputs.x[0], choices=skewed, return_aux=True)[1].record
        if record.loads_P != plans["helped"].load_P:
            raise RuntimeError(f"the layer has loads {record.loads_P}, not those of its plan")
        about = {
            "utilisation": percent / 100,
            "rows_that_pay": pays,
            "moves": plans["helped"].moves,
            "loads": {name: plan.load_P for name, plan in plans.items()},
            "links": {name: plan.links_P2.tolist() for name, plan in plans.items()},
            "bytes_moved": ranks.slowest([float(record.bytes_moved)])[0],
        }
        cases = [
            case("helped", helping, skewed),
            case("not helped", plain, skewed),
            case("even", plain, even),
            case("even, option on", helping, even),
            *(experts_alone(plain, 2 * shape.tokens, one_rank=one) for one in (False, True)),
            *(link_alone(plain, shape.tokens, both_ways=both) for both in (False, True)),
            *counts_alone(plain, counts(even)),
        ]
        columns = functools.partial(derive, plans=plans, shape=shape, weights=weights)
        yield Point(f"{percent} %", cases, about, derive=columns, goals=GOALS)


def count_point(options) -> Point:
    """Return rows of the busiest rank over the mean, and moves, for random choices."""
    tokens, rows = options.tokens or _SHAPE.tokens, {}
    for ranks in (4, 8, 16, 64):
        experts, rng = 8 * ranks, torch.Generator().manual_seed(ranks)
        for name, exponent in _SKEWS.items():
            weight_E = (1.0 + torch.randperm(experts, generator=rng)) ** -exponent
            drawn = weight_E.multinomial(2 * tokens * ranks, True, generator=rng)
            count_PE = torch.stack([of.bincount(minlength=experts) for of in drawn.chunk(ranks)])
            home, plan = BalancePlan(count_PE), plan_step(count_PE)
            before, after = (max(each.load_P) / (2 * tokens) for each in (home, plan))
            row = {"before": before, "after": after, "moves": len(plan.moves)}
            rows[f"{ranks} ranks, {name}"] = row
    rows["all"] = {"after": max(row["after"] for row in rows.values())}
    goals = [Goal("all", "after", 1.05, at_most=True)]
    return Point("busiest over mean", [], derive=lambda _: rows, goals=goals)


@program(__doc__, OPTIONS)
def main(options, ranks):
    if options.mode == "count":
        points, how = [count_point(options)], {"repetitions": 1, "file": "balance-count"}
    else:
        ranks.expect(several=True)
        points, how = time_points(options, ranks), {"repetitions": 9, "warmup": 1}
        how["about"] = dataclasses.asdict(with_sizes(_SHAPE, options))
        how["file"] = f"balance-{ranks.world_size}"
    sweep("balance", options, ranks, points, **how)


if __name__ == "__main__":
    sys.exit(main())
