"""Layers of gated experts against their formula. On ranks: test_lora.py, test_fuzz.py."""

import pytest
import torch
from experts_on_ranks import by_hand
from torch.nn import functional

from fairseq_tutel.moe import MoELayer

E, M, F, TOKENS = 4, 6, 8, 24
# name -> the network and its options
NETWORKS = {
    "swiglu": ("swiglu", {}),
    "swiglu with biases": ("swiglu", {"bias": True}),
    "geglu": ("geglu", {}),
    "geglu with biases": ("geglu", {"bias": True}),
    "gpt-oss": ("clamped_swiglu", {"bias": True, "limit": 0.4}),
    "as in DeepSeek-V4": ("clamped_swiglu", {"limit": 0.3, "alpha": 1.0, "shift": 0.0}),
}


def make(name, **options):
    network, given = NETWORKS[name]
    torch.manual_seed(0)
    return MoELayer(
        M, E, F, expert_network=network, expert_options=given,
        **{"capacity_factor": 0.0, "second_expert_policy": "all", "seed": 3, **options},
    ).double()  # fmt: skip


def activation(network, gate, up, limit=None, alpha=1.702, shift=1.0, bias=False):
    if network == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate / (1 + torch.exp(-alpha * gate)) * (up + shift)
    return {"swiglu": functional.silu, "geglu": functional.gelu}[network](gate) * up


def formula(layer, x, name):
    """w2(activation(gate x, w1 x)) of the best two: Mixtral's block, and gpt-oss'."""
    network, given = NETWORKS[name]

    def linear(x, state, part):
        return functional.linear(x, state[f"{part}.weight"], state.get(f"{part}.bias"))

    def expert(x, state):
        parts = (linear(x, state, part) for part in ("fc_gate", "fc1"))
        return linear(activation(network, *parts, **given), state, "fc2")

    return by_hand(layer, x, expert)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("factor", [0.0, 4.0], ids=["ragged", "padded"])
def test_layer_is_the_formula(name, factor):
    layer = make(name, capacity_factor=factor)
    x = (2 * torch.randn(TOKENS, M, dtype=torch.float64)).requires_grad_()
    target = torch.randn(TOKENS, M, dtype=torch.float64)
    ys = layer(x), formula(layer, x, name)
    grads = [torch.autograd.grad((y * target).sum(), x)[0] for y in ys]
    torch.testing.assert_close(*ys)
    torch.testing.assert_close(*grads)


def test_clamped_swiglu_drops_out():
    x = torch.randn(TOKENS, M, dtype=torch.float64)
    for options in ({"dropout": 0.5}, {"activation_dropout": 0.5}):
        layer = make("gpt-oss", **options)
        ys = layer(x.repeat(800, 1)).view(800, TOKENS, M).mean(0)
        want = layer.eval()(x)
        assert not torch.equal(layer.train()(x), want)
        assert (ys - want).abs().max() < 0.2 * want.abs().max()
