"""Adaptive parallelism, slices: bytes, time and memory against a table worked out by hand."""

import dataclasses
import itertools
import math

import pytest
from plan_helpers import A100, memory_of, possible_r_of, settings_of, small, work_of

from fairseq_tutel.config import OVERLAP_DEGREES
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.planner import best_plan, make_plan

E, W, M, F = 64, 512, 4096, 16384
SHORT, LAYERS = ["model.decoder_layers=4"], 2  # of which two have experts
S, P = W // E, 2 * M * F + F  # numbers of an expert but for the output's bias


@pytest.fixture(scope="module")
def large():
    """Four of the 1.1T model's layers with 64 experts on 512 GPUs."""
    return settings_of(overrides=[*SHORT, "model.moe_expert_count=64"], gpus=W)


@pytest.mark.parametrize(
    ("placement", "r", "peers", "copies", "gather", "weights"),
    [
        ("replicated", 1, E, 1, 1, 0),
        ("replicated", 0, 1, 1, E, E * (P + M)),
        ("sliced", 0, 1, 1, W, E * (P + M)),
        ("sliced", 1, E, 1, S, P),
        ("sliced", 2, 2 * E, 2, S // 2, P // 2),
        ("sliced", 4, 4 * E, 4, S // 4, P // 4),
        ("sliced", 8, W, 8, 1, 0),
    ],
)
def test_where_tokens_and_weights_travel(large, placement, r, peers, copies, gather, weights):
    settings = large.with_placement(placement, r)
    plan = make_plan(settings, A100)
    traffic, work, b = plan.traffic, plan.work, 2
    rows = E * work.capacity
    assert (work.exchange_peers, traffic.gather_ranks, traffic.gathered) == (
        peers,
        gather,
        (weights,),
    )
    assert work.exchanges == (6 * LAYERS if r else 0)
    if r:
        assert work.exchange_bytes == copies * rows * M * b
    # two gathers, with recomputation: rings, whose GPUs are rE apart; the gradients' all-to-all
    there = back = 0.0
    if weights:
        near, port = 8 if r == 0 else 1, A100.network_bandwidth * A100.link_efficiency
        there = weights * b * (gather - 1) / gather / (near * port)
        there += A100.latency * math.log2(gather)
        back = weights * b * (gather - near) / gather / port
        back += A100.latency + (gather - 1) * A100.message_overhead
    assert plan.time.weights == pytest.approx(LAYERS * (2 * there + back))
    # of experts only the output's bias is left to average, and only a slice's state is held
    sliced = placement == "sliced"
    assert work.replica_bytes == LAYERS * b * (M if sliced else P + M)
    assert plan.parameters.local == LAYERS * ((P // S if sliced else P) + M)
    assert work.hardware_flops == work_of(large).hardware_flops


def test_a_gpu_with_all_experts_gathers_nothing():
    """On one GPU, and in expert groups of one: r=0 is r=1."""
    for settings in (small(gpus=1), small("model.moe_expert_parallel_size=1", gpus=4)):
        plans = [make_plan(settings.with_placement(r=r), A100) for r in (1, 0)]
        assert plans[0].time == plans[1].time and plans[0].memory == plans[1].memory


def test_memory(large):
    """Weights, gradients and statistics of experts fall S-fold; what is gathered comes on top."""
    whole, sliced = (
        make_plan(large.with_placement(placement), A100) for placement in ("replicated", "sliced")
    )
    experts = LAYERS * (P - P // S) * (2 + 2 + 2 * 2)
    assert whole.memory.states - sliced.memory.states == experts
    assert sliced.memory.gathered == 2 * P and whole.memory.gathered == 0
    settings = small("model.moe_expert_count=2", "model.checkpoint_activations=false")
    settings = settings.with_placement("sliced")
    parameters = count_parameters(settings)
    held = [memory_of(settings.with_placement(r=r), parameters) for r in (1, 2, 0)]
    gathered = [2 * 64 * 256 + 256, 0, 2 * (2 * 64 * 256 + 256 + 64)]
    assert [memory.gathered for memory in held] == [4 * size for size in gathered]
    # nothing is recomputed: two MoE layers keep theirs, and r times the rows they received
    rows = 2 * settings.routing.capacity(settings.tokens, True) * 64 * 4
    assert held[0].dispatch == 2 * 2 * rows and held[1].dispatch == 2 * 4 * rows
    assert held[0].activations - held[1].activations == 2 * 4 * gathered[0]
    assert held[2].activations - held[1].activations == 2 * 4 * gathered[2]


def test_the_best_of_all_choices(large):
    """As found by trying them one by one; and another one where that does not fit."""
    wide = large.replace(batch_size=2)
    plan = make_plan(wide, A100)
    best, tried = best_plan(plan), []
    for placement in ("replicated", "sliced"):
        placed = wide.with_placement(placement)
        parameters = count_parameters(placed)
        ways = itertools.product(possible_r_of(placed), ("linear", "2dh"), OVERLAP_DEGREES)
        for r, algorithm, degree in ways:
            model = {"moe_exchange": algorithm, "moe_overlap_degree": degree}
            settings = placed.with_placement(r=r).replace(model=model)
            tried.append(make_plan(settings, A100, parameters))
    assert best.time.total <= 1.01 * min(p.time.total for p in tried) < plan.time.total
    assert best.settings.placement == "sliced" and best.settings.exchange.r > 1
    tight = dataclasses.replace(A100, memory=min(p.memory.peak for p in tried) + A100.reserved)
    cramped = best_plan(make_plan(wide, tight))
    assert cramped.fits and not make_plan(wide, tight).fits
    dense = make_plan(settings_of(overrides=[*SHORT, "model.moe_freq=0"], gpus=8), A100)
    assert best_plan(dense) is dense
    # one node, an expert per GPU: nothing is gained by another algorithm, and there are no slices
    eight = best_plan(make_plan(settings_of(overrides=["model.moe_expert_count=8"], gpus=8), A100))
    assert eight.settings.exchange.algorithm == "linear"
    assert eight.settings.placement == "replicated"
