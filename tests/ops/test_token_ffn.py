"""Experts that read tokens where they are: against dispatch and experts of rows."""

import importlib

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close, rms_ratio
from helpers.dispatched import spied
from helpers.layers import run

from fairseq_tutel import ops
from fairseq_tutel.moe import MoELayer

operator = importlib.import_module("fairseq_tutel.ops.token_ffn")  # a function has its name
T, K, E, M, F = 7, 3, 4, 8, 16


def routed(gated, device, dtype):
    """Tokens, maps and parameters: one expert has no rows, one pair is dropped."""
    expert_TK = torch.randint(3, (T, K))
    expert_TK[2, 1] = -1
    order = expert_TK.flatten().argsort(stable=True)[1:]  # without the dropped pair
    src_pair = torch.cat([order, torch.full((2,), -1)]).int()  # and two rows of nobody
    dest_row = torch.full((T * K,), -1, dtype=torch.int32)
    dest_row[order] = torch.arange(len(order), dtype=torch.int32)
    count_E = torch.bincount(expert_TK.flatten()[order], minlength=E)
    width = 2 * F if gated else F
    shapes = ((T, M), (E, width, M), (E, width), (E, M, F), (E, M))
    given = [torch.randn(shape).to(dtype).to(device).requires_grad_() for shape in shapes]
    maps = dest_row.view(T, K).to(device), src_pair.to(device)
    return given, maps, count_E.cumsum(0).int().to(device)


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_experts_of_written_rows(way, gated, dtype, backend):
    given, maps, offsets = routed(gated, "cpu", dtype)
    activation, used = "swiglu" if gated else "silu", int(offsets[-1])
    options = ops.FFNOptions(activation, (0.0, 0.0))
    d_out = torch.randn(used, M)
    exact = [value.detach().double().requires_grad_() for value in given]
    rows = naive.dispatch(exact[0], *maps)
    want = ops.expert_ffn(rows, *exact[1:], activation=activation, offsets=offsets)[:used]
    want.backward(d_out.double())
    backend(way)
    x, *params = given
    got = ops.token_ffn(x, *maps, *params, offsets=offsets, options=options)
    assert got.dtype == dtype and len(got) == used + 2
    got[:used].backward(d_out.to(dtype))
    assert_close("out", got[:used], want, dtype)
    for name, value, reference in zip(("x", "w1", "b1", "w2", "b2"), given, exact, strict=True):
        assert_close(name, value.grad, reference.grad, dtype)


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
def test_multiplies_in_fp8_as_the_experts_of_written_rows(way, backend):
    (x, *params), maps, offsets = routed(True, "cpu", torch.float32)
    rows, used, outs = naive.dispatch(x, *maps), int(offsets[-1]), []
    backend(way)
    for fp8 in (True, False):
        options = ops.FFNOptions("swiglu", (0.0, 0.0), fp8=fp8)
        outs.append(ops.token_ffn(x, *maps, *params, offsets=offsets, options=options)[:used])
    backend("torch")
    want = ops.expert_ffn(rows, *params, activation="swiglu", offsets=offsets, fp8=True)[:used]
    # one number may be rounded the other way
    assert rms_ratio(outs[0], want) < 0.01 < 0.02 < rms_ratio(outs[1], want)


@pytest.mark.interpreted
@pytest.mark.parametrize("network", ["ffn", "swiglu"])
def test_a_layer_with_and_without_written_rows(network, backend, monkeypatch):
    """Equal to fp32's rounding; wide experts, and a hook that wants the rows, get them written."""
    backend("triton")
    dispatched = spied(monkeypatch, ops, "dispatch")
    layer = MoELayer(M, E, F, top_k=K, capacity_factor=0.0, seed=1, expert_network=network)
    x = torch.randn(T, M)

    gathered = run(layer, x, x)
    assert not dispatched
    monkeypatch.setattr(operator, "_WIDEST", F - 1)
    for name, want in run(layer, x, x).items():
        assert_close(name, gathered[name], want, torch.float32)
    assert len(dispatched) == 1
    monkeypatch.setattr(operator, "_WIDEST", 2 * F)
    seen = []
    layer.experts.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    run(layer, x, x)
    assert len(dispatched) == 2 and seen == [T * K]


def test_refusals():
    given, maps, offsets = routed(False, "cpu", torch.float32)
    x, *params = given
    options = ops.FFNOptions("silu", (0.0, 0.0))
    with pytest.raises(ValueError, match=r"x must be \(7, model_dim\)"):
        ops.token_ffn(x[:-1], *maps, *params, offsets=offsets, options=options)
    with pytest.raises(ValueError, match="src_pair must be"):
        ops.token_ffn(x, maps[0], maps[1].long(), *params, offsets=offsets, options=options)
