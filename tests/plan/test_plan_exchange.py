"""Exposed time of exchanges, and gain by help of busy ranks, against sums by hand."""

import pytest
import torch
from plan_helpers import A100, CONFIGS, settings_of

from fairseq_tutel import ops
from fairseq_tutel.config import EXCHANGES, OVERLAP_DEGREES, ExchangeConfig
from fairseq_tutel.distributed.balance import BalancePlan, plan_step
from fairseq_tutel.distributed.exchanges import Direction
from fairseq_tutel.moe.wire import row_bytes
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
from fairseq_tutel.plan.speed import exposed


@pytest.mark.parametrize("degree", OVERLAP_DEGREES)
@pytest.mark.parametrize("experts", [0.0, 0.3, 1.0, 2.0, 2.6, 9.0])
def test_a_pipeline_is_as_long_as_its_critical_path(degree, experts):
    """The link alone, one chunk's way through it all, or the products between two exchanges."""
    chunk, products = 1 / degree, experts / degree
    whole = exposed(chunk, products, chunk, degree) + experts
    if degree == 1:
        assert whole == 2 + experts
    else:
        assert whole == pytest.approx(max(2, 1 + (1 + experts) / degree, experts + 2 / degree))
    # weight gradients as long as the products hide what is left over, if it is not too much
    left = exposed(chunk, products, chunk, degree, meanwhile=experts)
    if degree > 1:
        assert left == pytest.approx(max(2 - 2 * experts, chunk, whole - 2 * experts))


def plan_of(**model):
    return make_plan(settings_of(gpus=512).replace(model=model), A100)


def test_update_of_the_1_1t_model():
    plain = plan_of()
    chunked = plan_of(moe_overlap_degree=4)
    assert plain.exchange.exposed == plain.exchange.carried == plain.time.all_to_all
    assert plain.exchange.hidden == 0 < 0.5 < chunked.exchange.hidden < 1
    work = plain.work
    predict = EXCHANGES.get("linear").predict
    quarter = predict(work.exchange_bytes / 4, work.exchange_peers, A100)
    assert chunked.exchange.carried == pytest.approx(4 * quarter * work.exchanges)
    # 16 layers; two forward passes, one of them the recomputation, and a backward pass
    products = work.exchange_bytes / 2 * 4 * 16384 / (312e12 * A100.matmul_efficiency)
    there = 4 * quarter
    forward = max(2 * there, there + (there + products) / 4, products + there / 2) - products
    backward = exposed(quarter, products / 4, quarter, 4, meanwhile=products)
    assert chunked.exchange.exposed == pytest.approx(16 * (2 * forward + backward))
    assert chunked.time.all_to_all == chunked.exchange.exposed
    assert chunked.time.total < plain.time.total
    words = ["model.moe_expert_count=1", "model.moe_top1_expert=true"]
    alone = make_plan(settings_of(overrides=words, gpus=1), A100)
    assert alone.time.all_to_all == alone.time.all_reduce == 0 == alone.work.exchanges


@pytest.mark.parametrize("dim", [4096, 200])
def test_bytes_of_a_row_are_those_that_the_operators_write(dim):
    for wire, direction, name in (
        ("bf16", Direction.DISPATCH, "bf16"),
        ("fp16", Direction.COMBINE, "fp16"),
        ("fp8", Direction.DISPATCH, "e4m3"),
    ):
        written = ops.encode_rows(torch.randn(3, dim), name)[0][0].nbytes
        assert row_bytes(ExchangeConfig(wire=wire), dim, torch.float32, direction) == written
        assert row_bytes(ExchangeConfig(), dim, torch.float32, direction) == 4 * dim
    assert row_bytes(ExchangeConfig(wire="bf16"), dim, torch.float16) == 2 * dim


def test_what_a_wire_saves_and_costs():
    """fp16 model: fp8 out, bf16 (which is not narrower) back; nothing saved in gradients."""
    same, fp8 = plan_of(), plan_of(moe_wire="fp8")
    assert fp8.exchange.casts > 0 == same.exchange.casts
    assert fp8.time.all_to_all == fp8.exchange.exposed + fp8.exchange.casts
    everywhere = plan_of(moe_wire="fp8", moe_wire_back="fp8", moe_wire_grad="fp8")
    # two of six directions; messages and starts stay
    saved = same.exchange.carried - fp8.exchange.carried
    assert saved == pytest.approx((same.exchange.carried - everywhere.exchange.carried) / 3)
    assert everywhere.exchange.carried < 0.6 * same.exchange.carried


def helped_plan(hardware, gpus, balance="true"):
    overrides = ["model.moe_expert_count=64", "model.moe_capacity_factor=0"]
    overrides += ["model.moe_expert_parallel_size=0", f"model.moe_balance_ranks={balance}"]
    settings = settings_of("experts_1024", overrides, gpus=gpus)
    return make_plan(settings, load_hardware(CONFIGS, hardware))


@pytest.mark.parametrize("hardware", ["a100-80g", "h100"])
def test_help_pays_inside_a_node_and_not_between_nodes(hardware):
    node, cluster = helped_plan(hardware, 8), helped_plan(hardware, 64)
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
    node = helped_plan("h100", 8)
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
    without, node = (helped_plan("h100", gpus, balance) for balance in ("false", "true"))
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
