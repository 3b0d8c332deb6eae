"""Gain by help of busy ranks: against sums by hand, and against the recorded measurement."""

import json

import pytest
from helpers.commands import ROOT
from plan_helpers import CONFIGS, settings_of

from fairseq_tutel.plan.balance import UTILISATIONS, gain_of_help, help_of, rows_that_pay
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.planner import make_plan
from fairseq_tutel.plan.report import describe

MEASURED = ROOT / "scripts/bench/results/balance-2.json"


def plan_of(hardware, gpus):
    overrides = ["model.moe_expert_count=64", "model.moe_capacity_factor=0"]
    overrides += ["model.moe_expert_parallel_size=0", "model.moe_balance_ranks=true"]
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
    gpu, rows = node.hardware, node.traffic.rows
    travel = 2 * 2 / (gpu.node_bandwidth * gpu.link_efficiency)  # of a weight and its gradient
    assert rows_that_pay(node) == pytest.approx(travel / (6 / gpu.product_rate(2)), abs=1)
    assert help_of(node, 0.5).rows == pytest.approx(rows / 7)


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


def test_the_formula_predicts_the_recorded_gains():
    results = json.loads(MEASURED.read_text(encoding="utf-8"))["results"]
    for of in results.values():
        ms = {case: phases["both"]["p50"] for case, phases in of["ms"].items()}
        rows = sum(of["loads"]) / len(of["loads"])
        moves = of["moves_of_busiest"] * of["rows_that_pay"] * ms["experts alone"] / rows
        without, helped = gain_of_help(ms["even"], ms["experts alone"], moves, of["utilisation"])
        measured = 1 / of["this_over"]["not helped"][1]
        assert without / helped == pytest.approx(measured, rel=0.15)
