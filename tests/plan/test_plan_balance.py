"""Gain by help of busy ranks: against sums by hand, and against the recorded measurement."""

import json

import pytest
from helpers.commands import ROOT
from plan_helpers import CONFIGS, settings_of

from fairseq_tutel.distributed.balance import BalancePlan, plan_step
from fairseq_tutel.plan.balance import (
    UTILISATIONS,
    LayerSpeeds,
    help_of,
    one_busy_rank,
    rows_that_pay,
)
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.planner import make_plan
from fairseq_tutel.plan.report import describe

MEASURED = ("balance-2", "balance-2-bandwidth")


def plan_of(hardware, gpus, balance="true"):
    overrides = ["model.moe_expert_count=64", "model.moe_capacity_factor=0"]
    overrides += ["model.moe_expert_parallel_size=0", f"model.moe_balance_ranks={balance}"]
    settings = settings_of("experts_1024", overrides, gpus=gpus)
    return make_plan(settings, load_hardware(CONFIGS, hardware))


@pytest.mark.parametrize("hardware", ["a100-80g", "h100"])
def test_help_pays_inside_a_node_and_not_between_nodes(hardware):
    node, cluster = plan_of(hardware, 8), plan_of(hardware, 64)
    gains = [help_of(node, u).gain for u in UTILISATIONS]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.2 and gains[-1] > 1
    assert f"{gains[0]:.2f} at 50 %" in describe(node)
    # 63 helpers, each with a part that takes less time than its weights between nodes
    assert rows_that_pay(cluster) > rows_that_pay(node)
    assert help_of(cluster, 0.88).gain == 1
    gpu = node.hardware
    travel = 2 * 2 / (gpu.node_bandwidth * gpu.link_efficiency)  # of a weight and its gradient
    assert rows_that_pay(node) == pytest.approx(travel / (6 / gpu.product_rate(2)), abs=1)


def test_help_takes_away_what_skew_adds():
    node = plan_of("h100", 8)
    found = help_of(node, 0.5)
    stack = node.parameters.stacks[0]
    products = 6 * stack.products * node.traffic.rows / node.hardware.product_rate(2)
    again = 4 / 3 if node.settings.model.checkpoint_activations else 1
    layers = stack.moe_layers * node.settings.update_freq
    added = layers * products * again + node.exchange.exposed
    assert found.without - node.time.total == pytest.approx(added)
    assert node.time.total <= found.helped < found.without


@pytest.mark.parametrize(("gpus", "helped"), [(2, 16), (8, 1)])
def test_weights_of_helped_experts_are_in_memory(gpus, helped):
    """With half of all rows on one GPU of two, the other helps half of its experts."""
    without, node = (plan_of("h100", gpus, balance) for balance in ("false", "true"))
    stack = node.parameters.stacks[0]
    assert without.memory.gathered == 0
    assert node.memory.gathered == helped * stack.expert * 2
    more = node.memory.activations - without.memory.activations
    layers = 0 if node.settings.model.checkpoint_activations else stack.moe_layers
    assert more == layers * node.memory.gathered


def test_products_links_and_moves_by_hand():
    """Rank 0 has 180 of 270 rows. Each of the others takes half of one of its experts."""
    busy, even = one_busy_rank(90, 3, 2, 0.5), one_busy_rank(90, 3, 2, 1.0)
    assert busy.sum(0).tolist() == [90, 90, 21, 24, 21, 24]
    speeds = LayerSpeeds(row=1, row_alone=0.5, one_way=3, both_ways=4, move=50)
    # links [sent, received]: 60, 60; 30, 120 of rank 0; 60, 60 of a helper
    assert speeds.seconds(BalancePlan(even)) == 3 * 90 + 4 * 60
    assert speeds.seconds(BalancePlan(busy)) == 3 * (45 + 135 / 2) + 3 * 120
    waits = (2 * 50 - 45) + (2 * 50 - 2 * 45)  # 45 own rows hide a part of two moves
    assert speeds.seconds(plan_step(busy)) == 3 * 90 + 4 * 60 + waits


@pytest.mark.parametrize("name", MEASURED)
def test_the_formula_predicts_the_recorded_gains(name):
    found = json.loads((ROOT / f"scripts/bench/results/{name}.json").read_text(encoding="utf-8"))
    rows, local = 2 * found["tokens"], found["experts"] // 2
    even = BalancePlan(one_busy_rank(rows, 2, local, 1.0))
    for of in found["results"].values():
        ms = {
            case: phases.get("both", phases["forward"])["p50"] for case, phases in of["ms"].items()
        }
        one_way = ms["link, one way"] / found["tokens"]
        speeds = LayerSpeeds(
            row=ms["experts alone, all ranks"] / 3 / rows,
            row_alone=ms["experts alone, rank 0"] / 3 / rows,
            one_way=4 * one_way,
            both_ways=4 * ms["link, both ways"] / found["tokens"],
            move=one_way * (2 * found["hidden_dim"] + found["hidden_dim"] / found["model_dim"] + 1),
        )
        busy = one_busy_rank(rows, 2, local, of["utilisation"])
        plans = BalancePlan(busy), plan_step(busy, min_rows=of["rows_that_pay"])
        without, helped = (speeds.seconds(p) - speeds.seconds(even) + ms["even"] for p in plans)
        assert without / helped == pytest.approx(of["derived"]["helped"]["predicted"], rel=0.01)
        measured = 1 / of["this_over"]["not helped"][1]
        assert without / helped == pytest.approx(measured, rel=0.15)
