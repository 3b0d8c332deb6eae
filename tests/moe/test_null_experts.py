"""Null experts: outputs of the gate that lead nowhere, balanced like the others."""

import math

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.routing import route

from fairseq_tutel import hosts
from fairseq_tutel.moe import MoEConfig, MoELayer, routing_counts
from fairseq_tutel.moe.load_bias import BINS

T, E, N, M = 37, 5, 3, 6


def inputs(tokens=T):
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(tokens, E + N, dtype=torch.float64, generator=generator)
    return logits.requires_grad_()


def loop(logits, config, capacity):
    """Weights [T, E] and balance loss, with gradient; rows of each expert; one pair at a time."""
    prob = logits.softmax(1)
    best = logits.detach().argsort(1, descending=True)[:, : config.top_k].tolist()
    used, kept = [0] * E, []
    for k in range(config.top_k):
        for t in range(len(logits)):
            e = best[t][k]
            if e < E and used[e] < capacity:
                used[e] += 1
                kept.append((t, e))
    weight = torch.zeros(len(logits), E, dtype=torch.float64)
    for t, e in kept:
        of_token = [other for token, other in kept if token == t]
        if config.normalize_before_dropping:
            of_token = [other for other in best[t] if other < E]
        total = sum(prob[t, other] for other in of_token) if config.top_k > 1 else 1.0
        weight = weight.index_put((torch.tensor(t), torch.tensor(e)), prob[t, e] / total)
    counted = [row[:1] if config.balance_choices == "first" else row for row in best]
    share = torch.tensor([e for row in counted for e in row]).bincount(minlength=E + N)
    share = share.double() / share.sum()
    return weight, (E + N) * (prob.mean(0) * share).sum(), used


@pytest.mark.parametrize("factor", [1.0, 0.0, -0.5], ids=["padded", "ragged", "dynamic"])
@pytest.mark.parametrize("choices", ["first", "all"])
@pytest.mark.parametrize("before", [False, True], ids=["", "normalised before"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_weights_loss_rows_and_gradient_are_those_of_a_loop(top_k, before, choices, factor):
    config = MoEConfig(
        E,
        top_k=top_k,
        null_experts=N,
        capacity_factor=factor,
        normalize_before_dropping=before,
        balance_choices=choices,
    )
    capacity = math.inf if factor == 0 else top_k * int(abs(factor) * math.ceil(T / (E + N)))
    logits = inputs()
    want, want_loss, used = loop(logits, config, capacity)
    routing, aux = route(logits, config, True)
    weight_TK = routing.topk_weight_TK
    got = weight_TK.new_zeros(T, E)
    got = got.scatter_add(1, routing.expert_TK.clamp(min=0).long(), weight_TK)
    assert rms_ratio(got, want) < 1e-12 and aux.loss.item() == pytest.approx(want_loss.item())
    assert routing.num_kept_per_expert_E.tolist() == used
    assert int(aux.num_null_KN.sum()) + int(aux.num_routed_KE.sum()) == T * top_k
    assert int(aux.num_null_KN.sum()) > 0
    target = torch.randn(T, E, dtype=torch.float64)
    pairs = ((want, want_loss), (got, aux.loss))
    grads = [torch.autograd.grad((target * w).sum() + 3 * x, logits)[0] for w, x in pairs]
    assert rms_ratio(grads[1], grads[0]) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"batch_prioritized": True},
        {"drop_policy": "probability", "overflow_rerouting": 2},
        {"second_expert_policy": "random"},
        {"second_expert_policy": "sampling", "overflow_rerouting": 1},
        {"load_bias": "quantile"},
        {"load_bias": "sign", "score_function": "sigmoid"},
        {"balance_scope": "sequence"},
    ],
    ids=str,
)
def test_other_options_never_send_a_row_to_a_null_expert(options):
    config = MoEConfig(E, top_k=3, null_experts=N, capacity_factor=0.6, **options)
    biased = "load_bias" in options
    bias = torch.linspace(-0.2, 0.2, E + N).double() if biased else None
    routing, aux = route(inputs(400), config, True, load_bias_E=bias)
    assert routing.expert_TK.max() == E - 1 and routing.num_experts == E
    kept_E = routing.expert_TK[routing.kept_TK].bincount(minlength=E)
    assert torch.equal(kept_E, routing.num_kept_per_expert_E.long())
    assert (kept_E <= routing.capacity).all() and kept_E.sum() > 250
    total_T = routing.topk_weight_TK.sum(1)
    assert torch.allclose(total_T[routing.kept_TK.any(1)], torch.ones(()).double())
    assert not total_T[~routing.kept_TK.any(1)].any()
    assert torch.isfinite(aux.loss) and 0 < aux.null_share < 100
    if bias is not None:
        shape = (E + N, BINS) if options["load_bias"] == "quantile" else (E + N,)
        assert aux.bias_counts.shape == shape


def test_a_token_of_null_experts_keeps_its_residual():
    torch.manual_seed(0)
    layer = MoELayer(M, E, 8, top_k=1, null_experts=N, capacity_factor=0.0)
    x = torch.randn(200, M)
    null_T = layer.gate.wg(x).argmax(1) >= E
    y, aux = layer(x, return_aux=True)
    assert 0 < null_T.sum() < 200
    assert torch.equal(y.any(1), ~null_T)
    assert aux.null_share.item() == pytest.approx(100 * null_T.float().mean().item())
    counts = routing_counts([aux], layer.groups)
    assert counts.load.shape == (1, E) and counts.load.sum() == (~null_T).sum()


@pytest.mark.parametrize("scope", ["rank", "global"])
def test_balance_over_ranks_counts_them_too(scope):
    """Of one rank both are the same."""
    torch.manual_seed(0)
    layer = MoELayer(M, E, 8, null_experts=N, balance_scope=scope, second_expert_policy="all")
    _, aux = layer(torch.randn(50, M), return_aux=True)
    torch.manual_seed(0)
    other = MoELayer(M, E, 8, null_experts=N, second_expert_policy="all")
    _, want = other(torch.randn(50, M), return_aux=True)
    assert aux.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)


@pytest.mark.parametrize("scope", ["rank", "global"])
def test_rejected_choices_do_not_tip_the_balance(scope):
    """An even gate has a balance loss of 1, though most second choices of experts are rejected."""
    torch.manual_seed(0)
    options = {"second_expert_policy": "random", "balance_choices": "all", "capacity_factor": 0.0}
    layer = MoELayer(M, E, 8, null_experts=N, balance_scope=scope, **options)
    with torch.no_grad():
        layer.gate.wg.weight.mul_(1e-4)
    _, aux = layer(torch.randn(500, M), return_aux=True)
    assert aux.loss.item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("rule", "rate"), [("quantile", 0.001), ("sign", 0.1)])
def test_a_load_bias_gives_them_their_share(rule, rate):
    """K * E / (E + N) experts of a token on average, whatever the gate says at first."""
    torch.manual_seed(0)
    options = {"top_k": 2, "null_experts": N, "capacity_factor": 0.0, "load_bias_rate": rate}
    layer = MoELayer(M, E, 8, load_bias=rule, **options)
    with torch.no_grad():
        layer.gate.wg.weight[E:] *= 8
    shares = []
    for _ in range(60):
        with hosts.collect_aux(layer) as found:
            layer(torch.randn(2000, M))
        hosts.update_load_bias(layer, [found])
        shares.append(found.layers[0][1].null_share.item())
    even = 100 * N / (E + N)
    assert shares[0] > even + 20
    assert shares[-1] == pytest.approx(even, abs=3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="load_importance_loss .* null_experts=2"):
        MoEConfig(E, gate_noise=1.0, load_importance_loss=True, null_experts=2)
    with pytest.raises(ValueError, match="shared_expert_dim=-1"):
        MoELayer(M, E, shared_expert_dim=-1)
    with pytest.raises(ValueError, match="null_experts=-1"):
        MoEConfig(E, null_experts=-1)
    with pytest.raises(ValueError, match="logits for 5 experts, the layer has 5 and 3 null"):
        route(torch.randn(T, E), MoEConfig(E, null_experts=N), True)
