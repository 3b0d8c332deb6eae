"""Selection by score + bias, sigmoid scores, and the rules by which the bias follows the load."""

import math

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.routing import route

from fairseq_tutel import hosts
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoEConfig, MoELayer, RouterStep, make_router
from fairseq_tutel.moe.load_bias import BINS, margin_histogram, quantile_bias, sign_bias
from fairseq_tutel.moe.routers.steps import Selection, select_top_k

T, E = 37, 6
SCORES = ("softmax", "sigmoid")


def inputs(seed=0, tokens=T):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, E, dtype=torch.float64, generator=generator)
    bias = torch.randn(E, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), bias


def weight_by_expert(routing):
    weight_TK = routing.topk_weight_TK
    weight_TE = weight_TK.new_zeros(len(weight_TK), E)
    return weight_TE.scatter_add(1, routing.expert_TK.clamp(min=0).long(), weight_TK)


def dense(logits, bias, config):
    """Weights [T, E] and balance loss from their definitions, with gradient; the key r."""
    score = logits.softmax(1) if config.score_function == "softmax" else logits.sigmoid()
    prob = score / score.sum(1, keepdim=True)
    weight = 1.0
    if config.load_bias_entropy:
        weight = -(prob * prob.log()).sum(1, keepdim=True).detach() / math.log(E)
    key = (logits if config.score_function == "softmax" else score).detach() + weight * bias
    chosen = torch.zeros_like(key).scatter(1, key.topk(config.top_k).indices, 1.0)
    weight = score * chosen
    if config.top_k > 1:
        weight = weight / weight.sum(1, keepdim=True)
    first = torch.zeros_like(key).scatter(1, key.topk(1).indices, 1.0)
    return config.route_scale * weight, E * (prob.mean(0) * first.mean(0)).sum(), key


@pytest.mark.parametrize("rule", ["sign", "quantile", "quantile entropy"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_selection_weights_loss_and_gradient_are_those_of_dense_tensors(
    rule, score, top_k, training
):
    rule, *entropy = rule.split()
    options = {"top_k": top_k, "load_bias": rule, "score_function": score, "route_scale": 2.5}
    config = MoEConfig(E, capacity_factor=0, load_bias_entropy=bool(entropy), **options)
    logits, bias = inputs()
    weight, loss, key = dense(logits, bias, config)
    routing, aux = route(logits, config, training, load_bias_E=bias)
    got = weight_by_expert(routing)
    assert rms_ratio(got, weight) < 1e-12
    assert aux.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    target = torch.randn(T, E, dtype=torch.float64)
    pairs = ((weight, loss), (got, aux.loss))
    want_grad, grad = (torch.autograd.grad((target * w).sum() + 3 * x, logits)[0] for w, x in pairs)
    assert rms_ratio(grad, want_grad) < 1e-12
    if not training:
        assert aux.bias_counts is None  # the bias is frozen
    elif rule == "sign":
        chosen = key.topk(top_k).indices.flatten()
        assert aux.bias_counts.tolist() == chosen.bincount(minlength=E).tolist()
    else:
        assert aux.bias_counts.shape == (E, BINS)
        assert aux.bias_counts.sum(1).tolist() == [T] * E


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("top_k", [1, 3])
def test_sigmoid_scores_and_no_bias(score, top_k):
    config = MoEConfig(E, top_k=top_k, capacity_factor=0, score_function=score, z_loss_weight=0.5)
    logits, _ = inputs()
    weight, loss, _ = dense(logits, 0.0, config)
    routing, aux = route(logits, config, True)
    assert rms_ratio(weight_by_expert(routing), weight) < 1e-12
    z_loss = logits.logsumexp(1).square().mean()
    assert aux.loss.item() == pytest.approx((loss + 0.5 * z_loss).item(), rel=1e-12)


@pytest.mark.parametrize("rule", ["sign", "quantile", "quantile entropy"])
def test_a_bias_of_zero_changes_no_bit(rule):
    for options in ({"top_k": 1}, {"batch_prioritized": True}, {"capacity_factor": 0.0}):
        logits = inputs()[0].detach().float().requires_grad_()
        found = []
        biased = {"load_bias": rule.split()[0], "load_bias_entropy": "entropy" in rule}
        for bias, extra in ((None, {}), (torch.zeros(E), biased)):
            routing, aux = route(logits, MoEConfig(E, **options, **extra), True, load_bias_E=bias)
            loss = routing.topk_weight_TK.square().sum() + aux.loss
            found.append((*routing[:6], aux.loss, torch.autograd.grad(loss, logits)[0]))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def histogram_of(logits, bias, config, pad=None):
    step = RouterStep(config, True, len(logits))
    chosen, counts = select_top_k(logits, step, pad, bias)
    assert isinstance(chosen, Selection) and chosen.expert_TK.shape == (len(logits), config.top_k)
    return chosen.expert_TK, counts


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_new_bias_is_the_quantile_of_what_tokens_need(top_k, entropy):
    logits, bias = inputs(tokens=5000)
    config = MoEConfig(E, top_k=top_k, load_bias="quantile", load_bias_entropy=entropy)
    _, counts = histogram_of(logits, bias, config)
    prob = logits.softmax(1)
    weight = -(prob * prob.log()).sum(1, keepdim=True) / math.log(E) if entropy else 1.0
    key = logits + weight * bias
    # a bias above it would choose e
    needed = (key.topk(top_k + 1).values[:, -1:] - logits) / weight
    want = torch.quantile(needed.detach(), top_k / E, dim=0)
    got = quantile_bias(bias, counts, top_k)
    # up to the mean, and to a bin's width: 8% of the way from the old bias
    moved, got = want - bias, got + want.mean()
    assert ((got - want).abs() <= 0.08 * moved.abs() + 0.002).all()
    assert (got - want).abs().max() < 0.25 * moved.abs().max()


def test_a_shift_between_logits_and_bias_changes_nothing_else():
    logits, bias = inputs(tokens=400)
    shift = torch.randn(E, dtype=torch.float64)
    config = MoEConfig(E, top_k=2, load_bias="quantile")
    expert, counts = histogram_of(logits, bias, config)
    shifted_expert, shifted_counts = histogram_of(logits + shift, bias - shift, config)
    assert torch.equal(expert, shifted_expert)
    # rounding moves few margins over the edge of a bin, that of the next best expert at 0 for one
    new, shifted = (
        quantile_bias(b, c, 2) for b, c in ((bias, counts), (bias - shift, shifted_counts))
    )
    assert (shifted + (shift - shift.mean()) - new).abs().max() < 2e-3


def test_margins_are_counted_without_padding_and_beyond_the_edges():
    key = torch.tensor([[0.0, -1e9, 1e9], [5.0, 4.0, 3.0], [9.0, 9.0, 9.0]])
    counts = margin_histogram(key, torch.tensor([0, 1, -1]), torch.tensor([False, False, True]))
    assert counts.sum(1).tolist() == [2, 2, 2]
    assert counts[1, -1] == 1 and counts[2, 0] == 1  # -1e9 and 1e9
    assert counts[:, BINS // 2].tolist() == [1, 1, 0]  # the next best themselves


def test_updates_repeated_on_one_batch_balance_it():
    logits, _ = inputs(tokens=4096)
    logits = (logits + torch.arange(E)).detach()
    config = MoEConfig(E, top_k=2, load_bias="quantile")
    bias = torch.zeros(E, dtype=torch.float64)
    loads = []
    for _ in range(12):
        expert, counts = histogram_of(logits, bias, config)
        load = expert.flatten().bincount(minlength=E)
        loads.append(load.double().mean() / load.max())
        bias = quantile_bias(bias, counts, 2)
        assert abs(bias.mean()) < 1e-12
    assert loads[0] < 0.5 and loads[-1] > 0.98


def test_three_steps_of_the_sign_by_hand():
    bias = torch.zeros(4)
    for counts, want in (
        ([8, 4, 2, 2], [-0.125, 0.0, 0.125, 0.125]),  # mean 4
        ([4, 4, 4, 4], [-0.125, 0.0, 0.125, 0.125]),
        ([1, 7, 4, 4], [0.0, -0.125, 0.125, 0.125]),
    ):
        bias = sign_bias(bias, torch.tensor(counts), 0.125)
        want = torch.tensor(want).double()
        torch.testing.assert_close(bias, want - want.mean())
    untouched = torch.tensor([0.5, -0.5])
    assert torch.equal(quantile_bias(untouched, torch.zeros(2, BINS), 1), untouched.double())


# ---- the state of a router


def test_half_models_keep_it_in_fp32_and_checkpoints_keep_it():
    layer = MoELayer(8, E, 8, load_bias="sign")
    layer.gate.load_bias += torch.arange(E) / 1000 + 1
    before = layer.gate.load_bias.clone()
    state = layer.half().state_dict()
    assert state["gate.load_bias"].dtype == torch.float32
    assert layer.gate.wg.weight.dtype == torch.float16
    assert torch.equal(layer.gate.load_bias, before)
    fresh = MoELayer(8, E, 8, load_bias="quantile")
    fresh.load_state_dict(state)
    assert torch.equal(fresh.gate.load_bias, before)
    with pytest.raises(RuntimeError, match="gate.load_bias.*give --moe-load-bias"):
        MoELayer(8, E, 8).load_state_dict(state)


def test_weights_without_it_start_with_zeros(caplog):
    caplog.set_level("WARNING", logger="fairseq_tutel")  # whatever another test has left
    layer = MoELayer(8, E, 8, load_bias="sign")
    layer.load_state_dict(MoELayer(8, E, 8).state_dict())
    assert not layer.gate.load_bias.any()
    assert "gate.load_bias: it starts with its initial value" in caplog.text


def passes(layer, parts):
    found = []
    for x in parts:
        with hosts.collect_aux(layer) as aux:
            layer(x).sum().backward()
        found.append(aux)
    return found


def updated(rule, parts, recompute=False):
    """The bias after two updates, each of forward passes over ``parts``."""
    torch.manual_seed(1)
    config = MoEConfig(E, load_bias=rule, load_bias_rate=0.25, capacity_factor=0)
    layer = MoELayer(8, config=config, hidden_dim=8, seed=2)
    for _ in range(2):
        if recompute:
            net = torch.nn.ModuleList([layer])
            found = []
            for x in parts:
                with hosts.collect_aux(net) as aux:
                    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                y.sum().backward()
                found.append(aux)
            hosts.update_load_bias(net, found)
        else:
            hosts.update_load_bias(layer, passes(layer, parts))
    return layer.gate.load_bias


def tokens():
    x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(5))
    return (x + torch.arange(8) / 4).requires_grad_()


def _updated_on_ranks():
    rank, world_size = process_world()
    mine = tokens().chunk(world_size)[rank]
    return {rule: updated(rule, mine) for rule in ("sign", "quantile")}


def test_ranks_and_passes_and_recomputation_leave_the_same_bits():
    found = run_ranks(_updated_on_ranks, 2)
    for rule in ("sign", "quantile"):
        want = updated(rule, tokens())
        assert want.abs().max() > 0.01
        assert torch.equal(updated(rule, [tokens().flatten(0, 1)]), want)
        assert torch.equal(updated(rule, tokens(), recompute=True), want)
        assert all(torch.equal(rank[rule], want) for rank in found)


# ---- what is refused


@pytest.mark.parametrize(
    "options, words",
    [
        ({"load_bias": "mean"}, ["load_bias='mean'", "none, sign, quantile"]),
        ({"score_function": "tanh"}, ["score_function='tanh'", "softmax, sigmoid"]),
        (
            {"load_bias": "sign", "second_expert_policy": "sampling"},
            ["load_bias='sign'", "second_expert_policy='all'", "'sampling'"],
        ),
        ({"load_bias": "sign", "top_k": E}, ["load_bias='sign'", f"top_k={E}"]),
        (
            {"load_bias": "sign", "load_importance_loss": True, "gate_noise": 1.0},
            ["load_importance_loss", "load_bias='sign'"],
        ),
        ({"load_bias_entropy": True}, ["load_bias_entropy", "load_bias='none'"]),
        ({"load_bias_rate": 0.0}, ["load_bias_rate=0.0 must be above 0"]),
        ({"route_scale": math.inf}, ["route_scale=inf must be a finite number"]),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(ValueError) as error:
        MoEConfig(E, **options)
    assert all(word in str(error.value) for word in words)


def test_a_plain_module_as_gate_has_no_bias():
    layer = MoELayer(8, E, 8, load_bias="sign", gate=torch.nn.Linear(8, E))
    with pytest.raises(ValueError, match="load_bias='sign' needs a router"):
        layer(torch.randn(3, 8))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_is_counted_and_does_not_end_the_process(value):
    layer = MoELayer(8, E, 8, load_bias="quantile")
    x = torch.randn(5, 8)
    x[0] = value
    _, aux = layer(x, return_aux=True)
    assert aux.bias_counts.sum() == 5 * E  # every token in one bin of each expert


def test_layers_may_differ_in_experts_and_rule():
    model = torch.nn.Sequential(
        MoELayer(8, 4, 8, load_bias="quantile"), MoELayer(8, 8, 8, load_bias="sign")
    )
    hosts.update_load_bias(model, passes(model, [torch.randn(16, 8, requires_grad=True)]))
    for layer, rule in zip(model, ("quantile", "sign"), strict=True):
        assert layer.gate.load_bias.shape == (layer.config.num_experts,)
        assert layer.config.load_bias == rule and layer.gate.load_bias.any()


def test_passes_without_counts_are_refused():
    layer = MoELayer(8, E, 8, load_bias="sign")
    layer.eval()
    with pytest.raises(ValueError, match="without counts of"):
        hosts.update_load_bias(layer, passes(layer, [torch.randn(3, 8, requires_grad=True)]))
    with pytest.raises(ValueError, match="at least one forward pass"):
        hosts.update_load_bias(layer, [])


def test_every_built_in_router_has_one():
    for name in ("linear", "cosine"):
        router = make_router(8, MoEConfig(E, router=name, load_bias="sign"))
        assert router.load_bias.shape == (E,) and "load_bias" in router.state_dict()
        assert "load_bias" not in make_router(8, MoEConfig(E, router=name)).state_dict()
