"""Layers of gated experts against their formula; ranks, checkpoints (operators: tests/ops)."""

import pytest
import torch
from experts_on_ranks import by_hand, check_on_ranks
from helpers.distributed import on_ranks
from torch.nn import functional

from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.experts import Experts, GeGLUExperts, SwiGLUExperts

E, M, F, TOKENS = 4, 6, 8, 24
GATES = {"swiglu": functional.silu, "geglu": functional.gelu}


def make_layer(network, bias=True, experts=E, **options):
    torch.manual_seed(0)
    return MoELayer(
        M, experts, F, expert_network=network, expert_options={"bias": bias},
        **{"capacity_factor": 0.0, "second_expert_policy": "all", "seed": 3, **options},
    )  # fmt: skip


def formula(layer, x):
    """w2(silu(w1 x) * w3 x) of the best two: Mixtral's block."""

    def linear(x, state, name):
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def expert(x, state):
        gate = GATES[layer.experts.gated_by](linear(x, state, "fc_gate"))
        return linear(gate * linear(x, state, "fc1"), state, "fc2")

    return by_hand(layer, x, expert)


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("network", GATES)
@pytest.mark.parametrize("factor", [0.0, 4.0], ids=["ragged", "padded"])
def test_layer_is_the_formula(network, bias, factor):
    layer = make_layer(network, bias, capacity_factor=factor).double()
    x = torch.randn(TOKENS, M, dtype=torch.float64)
    torch.testing.assert_close(layer(x), formula(layer, x))


def test_names_and_sizes():
    layer = make_layer("swiglu", bias=False)
    assert list(layer.state_dict())[1:3] == ["experts.0.fc_gate.weight", "experts.0.fc1.weight"]
    assert SwiGLUExperts.count(M, F) == (3 * M * F, 6 * M * F)
    assert GeGLUExperts.count(M, F, {"bias": True}) == (3 * M * F + 2 * F + M, 6 * M * F)
    assert Experts.count(M, F) == (2 * M * F + F + M, 4 * M * F)


def swiglu(experts, groups, **options):
    return make_layer("swiglu", experts=experts, groups=groups, **options).double()


@on_ranks(4, timeout=150)
def test_on_ranks(tmp_path):
    cases = [(E, "replicated", 1, 4), (2, "sliced", 1, 2), (2, "sliced", 0, 1)]
    check_on_ranks(swiglu, M, cases, tmp_path)  # more: tests/distributed/test_fuzz.py


# name -> options of the network
CLAMPED = {
    "gpt-oss": {"bias": True, "limit": 0.4},
    "as in DeepSeek-V4": {"limit": 0.3, "alpha": 1.0, "shift": 0.0},
}


def clamped(experts=E, groups=None, given=CLAMPED["gpt-oss"], **options):  # noqa: B006
    torch.manual_seed(0)
    return MoELayer(
        M, experts, F, expert_network="clamped_swiglu", expert_options=given, groups=groups,
        **{"capacity_factor": 0.0, "seed": 3, **options},
    ).double()  # fmt: skip


def clamped_formula(layer, x, limit, alpha=1.702, shift=1.0, bias=False):
    """The network number by number, of the best two."""

    def expert(x_M, state):
        def linear(v, name):
            out = state[f"{name}.weight"] @ v
            return out + state[f"{name}.bias"] if bias else out

        hidden = []
        for g, u in zip(linear(x_M, "fc_gate"), linear(x_M, "fc1"), strict=True):
            g = torch.minimum(g, g.new_tensor(limit))
            u = torch.maximum(torch.minimum(u, u.new_tensor(limit)), u.new_tensor(-limit))
            hidden.append(g / (1 + torch.exp(-alpha * g)) * (u + shift))
        return linear(torch.stack(hidden), "fc2")

    return by_hand(layer, x, expert)


@pytest.mark.parametrize("given", CLAMPED.values(), ids=CLAMPED)
@pytest.mark.parametrize("factor", [0.0, 4.0], ids=["ragged", "padded"])
def test_clamped_swiglu_is_the_formula(given, factor):
    layer = clamped(given=given, capacity_factor=factor)
    x = (2 * torch.randn(TOKENS, M, dtype=torch.float64)).requires_grad_()
    target = torch.randn(TOKENS, M, dtype=torch.float64)
    ys = layer(x), clamped_formula(layer, x, **given)
    grads = [torch.autograd.grad((y * target).sum(), x)[0] for y in ys]
    torch.testing.assert_close(*ys)
    torch.testing.assert_close(*grads)


def test_clamped_swiglu_drops_out():
    x = torch.randn(TOKENS, M, dtype=torch.float64)
    for options in ({"dropout": 0.5}, {"activation_dropout": 0.5}):
        layer = clamped(**options)
        ys = layer(x.repeat(800, 1)).view(800, TOKENS, M).mean(0)
        want = layer.eval()(x)
        assert not torch.equal(layer.train()(x), want)
        assert (ys - want).abs().max() < 0.2 * want.abs().max()
