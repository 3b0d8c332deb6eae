"""The rules by which the bias on the selection follows the load, and a router's state."""

import pytest
import torch
from helpers.routing import route

from fairseq_tutel import training
from fairseq_tutel.moe import MoEConfig, MoELayer
from fairseq_tutel.moe.load_bias import BINS, margin_histogram, quantile_bias, sign_bias

T, E = 37, 6


def inputs(tokens=T):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(tokens, E, dtype=torch.float64, generator=generator)
    bias = torch.randn(E, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), bias


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_new_bias_is_the_quantile_of_what_tokens_need(top_k):
    logits, bias = inputs(tokens=5000)
    config = MoEConfig(E, top_k=top_k, load_bias="quantile")
    routing, aux = route(logits, config, True, load_bias_E=bias)
    assert routing.expert_TK.shape == (len(logits), top_k)
    # a bias above it would choose e
    needed = (logits + bias).topk(top_k + 1).values[:, -1:] - logits
    want = torch.quantile(needed.detach(), top_k / E, dim=0)
    got = quantile_bias(bias, aux.bias_counts)
    # up to the mean, and to a bin's width: 8% of the way from the old bias
    moved, got = want - bias, got + want.mean()
    assert ((got - want).abs() <= 0.08 * moved.abs() + 0.002).all()
    assert (got - want).abs().max() < 0.25 * moved.abs().max()


def test_margins_are_counted_without_padding_and_beyond_the_edges():
    key = torch.tensor([[0.0, -1e9, 1e9], [5.0, 4.0, 3.0], [9.0, 9.0, 9.0]])
    pad = torch.tensor([False, False, True])
    counts = margin_histogram(key, torch.tensor([0, 1, -1]), 4, pad)
    assert counts[:, :BINS].sum(1).tolist() == [2, 2, 2]
    assert counts[:, BINS].tolist() == [8, 8, 8]
    assert counts[1, BINS - 1] == 1 and counts[2, 0] == 1  # -1e9 and 1e9
    assert counts[:, BINS // 2].tolist() == [1, 1, 0]  # the next best themselves


def test_a_step_of_the_sign_by_hand():
    bias = sign_bias(torch.full((4,), 0.5), torch.tensor([8, 4, 2, 2]), 0.125)
    assert bias.tolist() == [-0.15625, -0.03125, 0.09375, 0.09375]  # their mean is zero
    untouched = torch.tensor([0.5, -0.5])
    assert torch.equal(quantile_bias(untouched, torch.zeros(2, BINS + 1)), untouched.double())


def test_half_models_keep_it_in_fp32_and_checkpoints_keep_it(caplog):
    caplog.set_level("WARNING", logger="fairseq_tutel")  # whatever another test has left
    layer = MoELayer(8, E, 8, load_bias="sign")
    layer.load_state_dict(MoELayer(8, E, 8).state_dict())
    assert not layer.gate.load_bias.any()
    assert "gate.load_bias: it starts with its initial value" in caplog.text
    layer.gate.load_bias += torch.arange(E) / 1000 + 1
    before, state = layer.gate.load_bias.clone(), layer.half().state_dict()
    assert state["gate.load_bias"].dtype == torch.float32
    assert layer.gate.wg.weight.dtype == torch.float16
    fresh = MoELayer(8, E, 8, load_bias="quantile")
    fresh.load_state_dict(state)
    assert torch.equal(fresh.gate.load_bias, before) and torch.equal(layer.gate.load_bias, before)
    with pytest.raises(RuntimeError, match="gate.load_bias.*give --moe-load-bias"):
        MoELayer(8, E, 8).load_state_dict(state)
    torch.set_default_dtype(torch.bfloat16)  # in which a step of 0.001 would be lost
    try:
        assert MoELayer(8, E, 8, load_bias="sign").gate.load_bias.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def passes(layer, parts):
    found = []
    for x in parts:
        with training.collect_aux(layer) as aux:
            y = layer(x)
        y.sum().backward()
        found.append(aux)
    return found


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_the_bias_is_that_of_one_batch(rule):
    """Also beside a layer of other experts; on ranks: fairseq's test_equivalence.py."""
    x, found = (torch.randn(4, 16, 8) + torch.arange(8) / 4).requires_grad_(), []
    for parts in (x, [x.flatten(0, 1)]):
        torch.manual_seed(1)
        rate = {"load_bias_rate": 0.25} if rule == "sign" else {}
        config = MoEConfig(E, load_bias=rule, capacity_factor=0, **rate)
        layer = MoELayer(8, config=config, hidden_dim=8, seed=2)
        model = torch.nn.Sequential(layer, MoELayer(8, 4, 8, load_bias="quantile"))
        for _ in range(2):
            training.update_load_bias(model, passes(model, parts))
        found.append(layer.gate.load_bias)
    assert found[0].abs().max() > 0.01 and model[1].gate.load_bias.any()
    torch.testing.assert_close(*found)


SHARED = [("quantile", (1, 3), 0, 12, 0.95), ("quantile", (2,), 3, 12, 0.95),
          ("sign", (2,), 3, 100, 0.75)]  # fmt: skip


@pytest.mark.parametrize("rule, of_calls, nulls, steps, even", SHARED, ids=str)
def test_experts_get_even_shares(rule, of_calls, nulls, steps, even):
    """Null experts too, and where calls, also of one update, route to other numbers."""
    torch.manual_seed(0)
    rate = {"load_bias_rate": 0.05} if rule == "sign" else {}
    options = {"load_bias": rule, "null_experts": nulls, "capacity_factor": 0, **rate}
    layer, x = MoELayer(8, 16, 8, **options), torch.randn(4096, 8) + torch.arange(8) / 4
    for _ in range(steps):
        found, load = [], 0
        for top_k in of_calls:
            with training.collect_aux(layer) as aux:
                layer(x, top_k=top_k)
            found.append(aux)
            report = aux.layers[0][1]
            of_nulls = report.num_null_KN.sum(0) if nulls else report.load_E[:0]
            load = load + torch.cat([report.load_E, of_nulls]).double()
        training.update_load_bias(layer, found)
    assert load.mean() / load.max() > even


def train(layer, steps, update, passes_per_step=1):
    for _ in range(steps):
        found = passes(layer, torch.randn(passes_per_step, 8, 8))
        with torch.no_grad():
            layer.gate.expert_dirs.add_(0.01)  # as an optimizer does
        if update:
            training.update_load_bias(layer, found)


def test_a_bias_that_nobody_moves_is_named_once(caplog):
    caplog.set_level("WARNING", logger="fairseq_tutel")
    make = lambda: MoELayer(8, E, 8, load_bias="quantile", router="cosine")  # noqa: E731
    train(make(), 40, update=True)
    train(make(), 3, update=False, passes_per_step=20)  # gradients are accumulated
    with torch.no_grad():
        for _ in range(40):
            make()(torch.randn(8, 8))  # nothing is trained
    assert not caplog.records
    train(make(), 40, update=False)
    (record,) = caplog.records
    assert "update_load_bias" in record.getMessage()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_is_counted_and_does_not_end_the_process(value):
    layer = MoELayer(8, E, 8, load_bias="quantile")
    x = torch.randn(5, 8)
    x[0] = value
    _, aux = layer(x, return_aux=True)
    assert aux.bias_counts[:, :BINS].sum() == 5 * E  # every token in one bin of each expert


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_passes_without_counts_are_refused(rule):
    layer = MoELayer(8, E, 8, load_bias=rule)
    layer.eval()
    with pytest.raises(ValueError, match="the 1 given have no counts"):
        training.update_load_bias(layer, passes(layer, [torch.randn(3, 8, requires_grad=True)]))
    with pytest.raises(ValueError, match="at least one forward pass.*the 0 given"):
        training.update_load_bias(layer, [])
