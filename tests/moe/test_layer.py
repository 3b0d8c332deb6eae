"""The whole layer on one rank against a loop over tokens and experts, and its interface."""

import math

import pytest
import torch
from gating_reference import gating, train_capacity
from helpers.assertions import assert_close, rms_ratio
from torch import nn
from torch.nn import functional as F

from fairseq_tutel.backends.torch import expert_ffn
from fairseq_tutel.distributed import ExpertParallelGroups, is_expert
from fairseq_tutel.moe import METRIC_NAMES, MoELayer, RouterStep, route_logits

M, HIDDEN, E = 6, 10, 4

# name -> options of the layer; 14 tokens: ceil(14/4) = 4 slots per choice, so that some are dropped
CASES = {
    "top1": {"top_k": 1},
    "top1 dropless": {"top_k": 1, "capacity_factor": 0.0},
    "top2": {"top_k": 2},
    "top2 dropless": {"top_k": 2, "capacity_factor": 0.0},
    "top2 dynamic": {"top_k": 2, "capacity_factor": -0.5},
    "top2 prioritised": {"top_k": 2, "batch_prioritized": True, "normalize_before_dropping": True},
    "top2 padding": {"top_k": 2, "use_pad_mask": True},
    "top4 is every expert": {"top_k": 4, "capacity_factor": 0.5},
    "evaluation capacity": {"top_k": 2, "eval_capacity_factor": 0.5},
    "relu": {"top_k": 2, "activation": "relu"},
    "swish": {"top_k": 1, "activation": "swish"},
    "top1 shared expert": {"top_k": 1, "shared_expert_dim": 5},
    "top2 dropless shared expert": {"capacity_factor": 0.0, "shared_expert_dim": 5},
}


@pytest.fixture(params=["experts block by block", "experts as whole products"])
def both_ways(request, monkeypatch):
    """CPUs and GPUs compute the experts differently."""
    by_blocks = request.param == "experts block by block"
    monkeypatch.setattr(expert_ffn, "_by_blocks", lambda rows: by_blocks)


def make_layer(dtype=torch.float64, **options):
    torch.manual_seed(1)
    options.setdefault("second_expert_policy", "all")
    layer = MoELayer(M, E, HIDDEN, **options).to(dtype)
    with torch.no_grad():
        layer.gate.wg.weight.mul_(4)  # skewed: some experts overflow
    return layer


def leaves(layer):
    """Own copies of all weights under their names in a state dict."""
    return {
        name: value.detach().clone().double().requires_grad_()
        for name, value in layer.state_dict().items()
    }


def gradients(layer):
    """Gradient of every parameter under the name of its weight in a state dict."""
    grads = {}
    for name, param in layer.named_parameters():
        single = layer.experts.single_names() if name.startswith("experts.") else {}
        names = single.get(name.removeprefix("experts."))
        if names is None:
            grads[name] = param.grad
        else:
            grads.update({f"experts.{n}": g for n, g in zip(names, param.grad, strict=True)})
    return grads


def loop(weights, x_TM, config, training, pad_T, activation):
    """(y, gating) by a loop over tokens and experts."""
    tokens = len(x_TM)
    factor = config.capacity_factor if training else config.eval_capacity_factor
    capacity = math.inf
    if factor != 0:
        capacity = train_capacity(tokens, E, config.top_k) * abs(factor)
        assert capacity == int(capacity)
    routed = gating(
        x_TM @ weights["gate.wg.weight"].t(),
        config.top_k,
        capacity,
        pad_T=pad_T,
        normalize_before=config.normalize_before_dropping,
        prioritized=config.batch_prioritized,
    )
    act = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}[activation]
    rows = []
    for t in range(tokens):
        y = torch.zeros(M, dtype=torch.float64)
        if "shared_expert.fc1.weight" in weights:
            w = {k.removeprefix("shared_expert."): v for k, v in weights.items()}
            hidden = act(w["fc1.weight"] @ x_TM[t] + w["fc1.bias"])
            y = w["fc2.weight"] @ hidden + w["fc2.bias"]
        for e in range(E):
            if routed.kept_KTE[:, t, e].any():
                w = {
                    k: weights[f"experts.{e}.{k}"]
                    for k in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
                }
                hidden = act(w["fc1.weight"] @ x_TM[t] + w["fc1.bias"])
                y = y + routed.weight_TE[t, e] * (w["fc2.weight"] @ hidden + w["fc2.bias"])
        rows.append(y)
    return torch.stack(rows), routed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CASES)
def test_layer_equals_a_loop(name, training, dtype, both_ways):
    options = CASES[name]
    layer = make_layer(dtype, **options).train(training)
    weights = leaves(layer)
    x = torch.randn(2, 7, M, dtype=dtype, requires_grad=True)
    pad = torch.tensor([[0] * 7, [0] * 4 + [1] * 3]).bool() if options.get("use_pad_mask") else None
    y, aux = layer(x, pad_mask=pad, return_aux=True)
    target = torch.randn_like(y)
    ((y * target).sum() + 2 * aux.loss).backward()

    own_x = x.detach().double().reshape(14, M).requires_grad_()
    want, routed = loop(
        weights,
        own_x,
        layer.config,
        training,
        None if pad is None else pad.flatten(),
        options.get("activation", "gelu"),
    )
    ((want * target.double().reshape(14, M)).sum() + 2 * routed.loss).backward()

    assert y.shape == x.shape and y.dtype == dtype
    assert_close("y", y.reshape(14, M), want, dtype)
    assert_close("aux loss", aux.loss, routed.loss, dtype)
    assert_close("gradient of x", x.grad.reshape(14, M), own_x.grad, dtype)
    grads = gradients(layer)
    assert set(grads) == set(weights)
    for key, weight in weights.items():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert_close(f"gradient of {key}", grads[key], grad, dtype)
    for key, value in aux.metrics_dict().items():
        assert value == pytest.approx(routed.metrics[key], rel=1e-5, abs=1e-5), key
    assert set(routed.metrics) == set(METRIC_NAMES)


@pytest.mark.parametrize("factor", [1.0, 0.0, -0.5], ids=["padded", "ragged", "dynamic"])
def test_gradient_check_in_fp64(factor):
    """Numerical derivatives of output and aux loss for x and every weight."""
    layer = make_layer(capacity_factor=factor)
    x = torch.randn(5, M, dtype=torch.float64, requires_grad=True)
    names, params = zip(*layer.named_parameters(), strict=True)

    def function(x, *values):
        y, aux = torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), x, {"return_aux": True}
        )
        return y, aux.loss

    assert torch.autograd.gradcheck(function, (x, *params), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.0], ids=["padded", "ragged"])
def test_half_precision_stays_within_its_rounding(dtype, factor):
    """Same weights and tokens in fp64: routing is equal, because fp32 gating sees the same sums."""
    layer = make_layer(dtype, capacity_factor=factor)
    exact = make_layer(torch.float64, capacity_factor=factor)
    exact.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    x = torch.randn(14, M, dtype=dtype, requires_grad=True)
    own_x = x.detach().double().requires_grad_()
    target = torch.randn(14, M)
    for inputs, module in ((x, layer), (own_x, exact)):
        y, aux = module(inputs, return_aux=True)
        ((y * target.to(y.dtype)).sum() + aux.loss).backward()
        assert aux.loss.dtype == (torch.float64 if inputs is own_x else torch.float32)
    unit = torch.finfo(dtype).eps
    assert rms_ratio(layer(x), exact(own_x)) < 2 * unit
    assert rms_ratio(x.grad, own_x.grad) < 4 * unit
    want = gradients(exact)
    for key, grad in gradients(layer).items():
        assert grad.dtype == dtype and rms_ratio(grad, want[key]) < 4 * unit, key


@pytest.mark.parametrize("factor", [1.0, 0.0], ids=["padded", "ragged"])
def test_no_tokens(factor):
    layer = make_layer(torch.float32, capacity_factor=factor, shared_expert_dim=3)
    x = torch.empty(0, M, requires_grad=True)
    y, aux = layer(x, return_aux=True)
    (y.sum() + aux.loss).backward()
    assert y.shape == (0, M) and aux.loss == 0 and x.grad.shape == (0, M)
    for name, param in layer.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


@pytest.mark.parametrize("factor", [1.0, 0.0], ids=["padded", "ragged"])
def test_all_tokens_on_one_expert(factor):
    """The others are empty: their gradients are zero, not missing, and nothing is NaN."""
    layer = make_layer(torch.float32, capacity_factor=factor, top_k=1)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()[2] = 1.0
    x = torch.rand(12, M) + 1
    y, aux = layer(x, return_aux=True)
    y.sum().backward()
    assert aux.load_E.tolist() == [0, 0, 12, 0]
    grad = layer.experts.fc1_weight.grad
    assert grad[2].any() and not grad[[0, 1, 3]].any()
    live = y.abs().sum(1) > 0
    assert live.tolist() == [factor == 0 or t < 3 for t in range(12)]


def test_dropout_is_inside_the_experts_and_off_in_evaluation(both_ways):
    layer = make_layer(torch.float32, dropout=0.5, activation_dropout=0.3, capacity_factor=0.0)
    plain = make_layer(torch.float32, capacity_factor=0.0)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(14, M)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(first, layer(x))
    assert not torch.equal(first, layer(x))
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    many = x.repeat(2000, 1)  # dropout after the last product keeps the mean
    only_out = make_layer(torch.float32, dropout=0.5, capacity_factor=0.0)
    only_out.load_state_dict(layer.state_dict())
    mean = only_out(many).view(2000, 14, M).mean(0)
    assert rms_ratio(mean, plain.train()(x)) < 0.05


def test_state_dict_has_the_names_of_the_moe_branch():
    layer = make_layer(torch.float32)
    state = layer.state_dict()
    shapes = {
        "fc1.weight": (HIDDEN, M),
        "fc1.bias": (HIDDEN,),
        "fc2.weight": (M, HIDDEN),
        "fc2.bias": (M,),
    }
    want = {f"experts.{j}.{k}": s for j in range(E) for k, s in shapes.items()}
    want["gate.wg.weight"] = (E, M)
    assert {k: tuple(v.shape) for k, v in state.items()} == want
    other = make_layer(torch.float32, seed=9)
    assert not torch.equal(other.experts.fc1_weight, layer.experts.fc1_weight)
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(other.experts.fc2_bias[3], state["experts.3.fc2.bias"])


def test_wrong_state_dicts_are_refused_by_name():
    layer = make_layer(torch.float32)
    state = layer.state_dict()
    for key, change, message in (
        ("experts.1.fc1.bias", None, r'Missing key.*"experts.1.fc1.bias"'),
        ("experts.4.fc1.bias", torch.zeros(HIDDEN), r'Unexpected key.*"experts.4.fc1.bias"'),
        ("experts.1.fc2.bias", torch.zeros(3), r"size mismatch for experts.1.fc2.bias.*3.*6"),
    ):
        broken = dict(state)
        if change is None:
            del broken[key]
        else:
            broken[key] = change
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            layer.load_state_dict(broken)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_initial_weights_of_an_expert_do_not_depend_on_the_ranks(world_size):
    """Experts differ from each other, replicas do not, and the ranks' number changes nothing."""
    whole = MoELayer(M, E, HIDDEN, seed=5).state_dict()
    for rank in range(world_size):
        groups = ExpertParallelGroups(
            E,
            rank=rank,
            world_size=world_size,
            ep_size=min(E, world_size),
            num_replicas=max(1, world_size // E),
        )
        torch.manual_seed(rank)  # must not matter
        part = MoELayer(M, E, HIDDEN, seed=5, groups=groups)
        for j, expert in enumerate(groups.local_experts):
            for key in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
                got = part.state_dict()[f"experts.{j}.{key}"]
                assert torch.equal(got, whole[f"experts.{expert}.{key}"])
    assert not torch.equal(whole["experts.0.fc1.weight"], whole["experts.1.fc1.weight"])
    bound = 1 / math.sqrt(M)
    for key in ("fc1.weight", "fc1.bias"):
        values = torch.cat([whole[f"experts.{e}.{key}"].flatten() for e in range(E)])
        assert values.abs().max() <= bound and values.std() > 0.4 * bound


class _FixedGate(nn.Module):
    """Token t goes to expert t mod E first, the next one second."""

    def forward(self, x_TM):
        logits = torch.full((len(x_TM), E), -9.0, dtype=x_TM.dtype)
        index = torch.arange(len(x_TM))
        logits[index, index % E] = 1.0
        logits[index, (index + 1) % E] = 0.0
        return logits


@pytest.mark.parametrize("factor", [1.0, 0.0], ids=["padded", "ragged"])
def test_custom_gate_and_custom_experts(factor):
    """Experts that multiply by a number of their own; the result is known by hand."""

    class Scale(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = nn.Parameter(torch.tensor(value))

        def forward(self, x):
            return x * self.value

    layer = MoELayer(
        M,
        E,
        gate=_FixedGate(),
        experts=[Scale(10.0**e) for e in range(E)],
        top_k=2,
        capacity_factor=factor,
        second_expert_policy="all",
    )
    assert all(is_expert(p) for p in layer.experts.parameters())
    x = torch.randn(8, M)
    y = layer(x)
    first = math.e / (math.e + 1)
    for t in range(8):
        scale = first * 10.0 ** (t % E) + (1 - first) * 10.0 ** ((t + 1) % E)
        torch.testing.assert_close(y[t], scale * x[t], rtol=1e-5, atol=1e-6)
    y.sum().backward()
    want = sum(
        float(x[t].sum()) * (first if t % E == 1 else 1 - first)
        for t in range(8)
        if 1 in (t % E, (t + 1) % E)
    )
    assert layer.experts[1].value.grad.item() == pytest.approx(want, rel=1e-4)


def test_custom_experts_must_be_as_many_as_this_rank_holds():
    with pytest.raises(ValueError, match="3 expert modules given.*holds 4 of 4"):
        MoELayer(M, E, experts=[nn.Identity() for _ in range(3)])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"experts": nn.Linear}, "experts must be a list of modules"),
        ({"gate": "cosine"}, "gate must be a module, got 'cosine'; router='cosine'"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MoELayer(M, E, **options)


@pytest.mark.parametrize("training", [True, False])
def test_top_k_and_capacity_factor_of_one_call(training):
    layer = make_layer(torch.float32, top_k=1, capacity_factor=1.0).train(training)
    x = torch.randn(14, M)
    for options in ({"top_k": 4}, {"capacity_factor": 0.5}, {"top_k": 2, "capacity_factor": 0.0}):
        key = "capacity_factor" if training else "eval_capacity_factor"
        fixed = {key if k == "capacity_factor" else k: v for k, v in options.items()}
        other = make_layer(torch.float32, **{"top_k": 1, "capacity_factor": 1.0, **fixed})
        other.train(training)
        assert torch.equal(layer(x, **options), other(x))
        assert not torch.equal(layer(x, **options), layer(x))
    assert layer.config.top_k == 1 and layer.config.capacity_factor == 1.0


def test_input_dropout_and_jitter_change_training_only():
    x = torch.randn(14, M)
    for name in ("input_dropout", "input_jitter"):
        layer = make_layer(torch.float32, capacity_factor=0.0, **{name: 0.6})
        plain = make_layer(torch.float32, capacity_factor=0.0)
        assert torch.equal(layer.eval()(x), plain.eval()(x))
        torch.manual_seed(0)
        assert not torch.allclose(layer.train()(x), plain.train()(x))


def test_jitter_reaches_the_gate_only():
    """Multiplicative, uniform(1-j, 1+j); the experts see the tokens as they are."""
    seen = []

    class Spy(_FixedGate):
        def forward(self, x_TM):
            seen.append(x_TM.detach())
            return super().forward(x_TM)

    layer = MoELayer(M, E, gate=Spy(), experts=[nn.Identity() for _ in range(E)], input_jitter=0.25)
    x = torch.rand(500, M) + 1
    torch.testing.assert_close(layer(x, capacity_factor=0.0), x)
    ratio = seen[0] / x
    assert 0.75 <= ratio.min() < 0.76 and 1.24 < ratio.max() <= 1.25
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.01)


def test_exchange_times_are_filled_in_on_request():
    layer = make_layer(torch.float32, record_exchange_time=True)
    _, aux = layer(torch.randn(14, M), return_aux=True)
    assert aux.metrics_dict()["all_to_all_cpu_time_ms"] > 0
    _, plain = make_layer(torch.float32)(torch.randn(14, M), return_aux=True)
    assert plain.metrics_dict()["all_to_all_cpu_time_ms"] == 0


def test_wrong_sizes_are_refused_with_their_values():
    layer = make_layer(torch.float32)
    with pytest.raises(ValueError, match="model_dim=6, the input has 5"):
        layer(torch.randn(3, 5))
    with pytest.raises(ValueError, match="groups were built for 8 experts, the layer has 4"):
        MoELayer(M, E, groups=ExpertParallelGroups(8))
    with pytest.raises(ValueError, match="top_k=5 .* between 1 and the number of experts, 4"):
        layer(torch.randn(3, M), top_k=5)
    with pytest.raises(ValueError, match="unknown activation 'softplus'"):
        make_layer(torch.float32, activation="softplus")


def test_a_router_may_call_route_logits():
    """What is public in the package suffices to route with logits of one's own."""
    layer = make_layer(torch.float32)
    step = RouterStep(layer.config, training=True, num_tokens=6)
    routing, aux = route_logits(torch.randn(6, E), step)
    assert routing.topk_weight_TK.shape == (6, 2) and aux.loss > 0


def test_experts_notice_who_wants_to_see_their_calls():
    layer = MoELayer(8, 2, 8)
    assert not layer.experts.has_hooks
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert layer.experts.has_hooks
    assert not layer.experts.has_hooks
    layer.experts.forward = layer.experts.forward  # as checkpoint_wrapper of fairseq replaces it
    assert layer.experts.has_hooks
