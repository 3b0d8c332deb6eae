"""Experts that are held for evaluation alone: in a file, in bf16, in int8.

On ranks, other networks, held numbers: test_product.py.
"""

import pytest
import torch
from helpers.assertions import assert_close, rms_ratio

from fairseq_tutel.moe import MoELayer, hold_experts
from fairseq_tutel.moe.experts.int8 import Int8, expert_ffn_int8

DIM, EXPERTS = 32, 4


def make(storage="stacked", hidden_dim=64, **options):
    return MoELayer(
        DIM, EXPERTS, hidden_dim, top_k=2, seed=2, expert_storage=storage, **options
    ).eval()


def loaded(storage, **options):
    """(a layer, one with its weights held otherwise)"""
    torch.manual_seed(1)
    layer = make(**options)
    with torch.no_grad():  # outputs of unlike size, and one of zeros
        layer.experts.fc2_weight.mul_(torch.logspace(-3, 1, DIM)[:, None])
        layer.experts.fc2_weight[1, 3] = 0
    held = make(storage, **options)
    held.load_state_dict(layer.state_dict())
    return layer, held


@torch.no_grad()
def test_mapped_experts_are_the_state_dict():
    layer, held = loaded("mapped")
    x, state = torch.randn(7, DIM), layer.state_dict()
    weight = state["experts.2.fc1.weight"]
    weight += 1  # of the state dict, which the layer has not copied
    assert_close("y", held(x), layer(x), torch.float32)
    assert held.state_dict()["experts.2.fc1.weight"].data_ptr() == weight.data_ptr()
    layer.experts = hold_experts(layer.experts, "mapped")
    assert_close("y", held(x), layer(x), torch.float32)


@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("storage, most, size", [
    ("mapped", 1e-6, 4.2), ("bf16", 1e-2, 2.2), ("int8", 2e-2, 1.5),
])  # fmt: skip
@torch.no_grad()
def test_each_output_is_nearly_that_of_the_weights(storage, most, size, tokens):
    """Small outputs do not hide behind large ones; the held numbers: test_product.py."""
    layer, held = loaded(storage)
    x = torch.randn(tokens, DIM)
    y, want = held(x), layer(x)
    error = (y - want).square().mean(0).sqrt() / want.square().mean(0).sqrt()
    assert y.dtype == torch.float32 and error.median() < most
    assert not list(held.experts.parameters())
    weights = sum(p.numel() for n, p in layer.experts.named_parameters() if "weight" in n)
    assert held.experts.num_bytes() < weights * size


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "geglu"])
@torch.no_grad()
def test_int8_rows_are_the_same_bits_alone_and_together(activation):
    hidden_dim, rows = 64, torch.randn(40, DIM).bfloat16()
    width = hidden_dim * (1 if activation == "gelu" else 2)
    w1, w2 = (torch.randint(-127, 128, shape, dtype=torch.int8)
              for shape in ((width, DIM), (DIM, hidden_dim)))  # fmt: skip
    s1, s2 = (torch.rand(n).div(64).bfloat16() for n in (width, DIM))
    held = {"fc1_weight": Int8(w1[None], s1[None]), "fc2_weight": Int8(w2[None], s2[None])}
    held |= {"fc1_bias": torch.randn(width), "fc2_bias": torch.randn(DIM)}
    together = expert_ffn_int8(rows, held, activation)
    alone = [expert_ffn_int8(row[None], held, activation) for row in rows]
    assert torch.equal(together, torch.cat(alone))


def test_refusals():
    x, state = torch.randn(3, DIM), make().state_dict()
    state["experts.1.fc1.weight"] = torch.zeros(2, 2)
    del state["experts.0.fc2.bias"]
    held = lambda: loaded("int8")[1]  # noqa: E731
    for call, error, words in (
        (lambda: held().train()(x), ValueError, "'int8' have no gradients: they are for eval"),
        (lambda: held()(x.clone().requires_grad_()), ValueError, "have no gradients"),
        (lambda: held().to("meta"), ValueError, "int8 are for CPUs, .* product, not meta"),
        (lambda: torch.no_grad()(make("mapped"))(x), ValueError, "no weights until a state dict"),
        (lambda: make("bf16").load_state_dict(state), RuntimeError,
         r"(?s)Missing.*0.fc2.bias.*size mismatch.*1.fc1.weight"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


@torch.no_grad()
def test_moves_and_casts_leave_what_is_held():
    layer, held = loaded("bf16")
    x = torch.randn(5, DIM).half()
    before = held.experts.num_bytes()
    y = held.half()(x)
    assert y.dtype == torch.float16 and held.experts.num_bytes() == before
    assert rms_ratio(y, layer(x.float())) < 2e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert rms_ratio(loaded("int8")[1](x.float()), layer(x.float())) < 4e-2
