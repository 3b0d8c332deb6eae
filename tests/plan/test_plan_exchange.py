"""Exposed time of exchanges: the schedule, what it costs in messages and casts, what is chosen."""

import json

import pytest
import torch
from plan_helpers import CONFIGS, settings_of

from fairseq_tutel import ops
from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed.exchanges import Leg
from fairseq_tutel.plan import load_hardware, make_plan
from fairseq_tutel.plan.choose import DEGREES, with_best_exchange
from fairseq_tutel.plan.cli import main
from fairseq_tutel.plan.exchange import exposed, row_bytes

A100 = load_hardware(CONFIGS, "a100-80g")


@pytest.mark.parametrize("degree", DEGREES)
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


def test_two_exchanges_as_long_as_the_experts_gain_what_the_paper_bounds():
    """Twice as fast is the limit (arXiv 2206.03382 reports up to 2.00), 1.87 with 8 chunks."""
    gains = []
    for degree in DEGREES[1:]:
        best = max(
            (2 + f / 100) / (exposed(1 / degree, f / 100 / degree, 1 / degree, degree) + f / 100)
            for f in range(1, 1000)
        )
        gains.append(best)
    assert gains == pytest.approx([1.5, 1.75, 1.875], abs=0.01)


def plan_of(gpus=512, **model):
    return make_plan(settings_of(gpus=gpus).replace(model=model), A100)


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


def test_what_is_chosen_by_rung():
    """One node: linear. Thousands of GPUs, messages of KiB: 2dh. Always the least exposed."""
    for gpus in (8, 64, 512, 4096):
        plan = plan_of(gpus, moe_expert_count=gpus)
        best = with_best_exchange(plan)
        others = [
            plan_of(gpus, moe_a2a=name, moe_overlap_degree=degree).exchange.exposed
            for name in ("linear", "2dh")
            for degree in DEGREES
        ] if gpus == 512 else []  # fmt: skip
        assert best.exchange.exposed <= plan.exchange.exposed
        assert all(best.exchange.exposed <= other * (1 + 1e-9) for other in others)
        if gpus == 8:
            assert best.settings.exchange.algorithm == "linear"


@pytest.mark.parametrize("dim", [4096, 200])
def test_bytes_of_a_row_are_those_that_the_operators_write(dim):
    rows = torch.randn(3, dim)
    for wire, leg, name in (
        ("bf16", Leg.DISPATCH, "bf16"),
        ("fp16", Leg.COMBINE, "fp16"),
        ("fp8", Leg.DISPATCH, "e4m3"),
    ):
        written = ops.encode_rows(rows, name)[0]
        config = ExchangeConfig(wire=wire)
        assert row_bytes(config, leg, dim, torch.float32) == written[0].nbytes
        assert row_bytes(ExchangeConfig(), leg, dim, torch.float32) == rows[0].nbytes
    assert row_bytes(ExchangeConfig(wire="bf16"), Leg.DISPATCH, dim, torch.float16) == 2 * dim


def test_what_a_wire_saves_and_costs():
    """fp16 model: fp8 out, bf16 (which is not narrower) back; nothing saved in gradients."""
    same, fp8 = plan_of(), plan_of(moe_wire="fp8")
    assert fp8.exchange.casts > 0 == same.exchange.casts
    assert fp8.time.all_to_all == fp8.exchange.exposed + fp8.exchange.casts
    everywhere = plan_of(moe_wire="fp8", moe_wire_back="fp8", moe_wire_grad="fp8")
    # two of six legs; messages and starts stay
    saved = same.exchange.carried - fp8.exchange.carried
    assert saved == pytest.approx((same.exchange.carried - everywhere.exchange.carried) / 3)
    assert everywhere.exchange.carried < 0.6 * same.exchange.carried


def test_command_line(capsys):
    options = ["--config-dir", str(CONFIGS), "--config-name", "meta_1.1t"]
    arguments = [*options, "gpus=512"]
    assert main([*options, "--json", "gpus=512", "overlap=4", "exchange=2dh"]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = plan_of(moe_overlap_degree=4, moe_a2a="2dh")
    assert result["exchange"]["wire"] == "same"
    assert result["exchange"]["overlap_degree"] == 4 and result["exchange"]["algorithm"] == "2dh"
    assert result["predicted_exchange"]["exposed"] == pytest.approx(plan.exchange.exposed)
    # the same by the options of training
    assert main([*arguments, "+model.moe_a2a=2dh", "+model.moe_overlap_degree=4"]) == 0
    assert f"{plan.tokens_per_second:,.0f}" in capsys.readouterr().out
    for word, message in (
        ("overlap=3", "--moe-overlap-degree 3 must be one of"),
        ("overlap=x", "overlap=x"),
        ("wire=fp4", "fp4"),
    ):
        assert main([*arguments, word]) == 1
        assert message in capsys.readouterr().err
