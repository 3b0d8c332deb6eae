"""Dispatch, experts and combine as one operator, against loops and the single operators."""

import importlib

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close, rms_ratio
from helpers.layers import run

from fairseq_tutel import ops
from fairseq_tutel.config import STORED_FORMATS
from fairseq_tutel.config.formats import StoredFormat
from fairseq_tutel.moe import MoELayer

operator = importlib.import_module("fairseq_tutel.ops.expert_ffn")  # a function has its name
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
@pytest.mark.parametrize("memory", ["fast", "lean", "minimal"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_three_operators(way, gated, memory, dtype, backend):
    given, maps, offsets = routed(gated, "cpu", dtype)
    expert_TK = torch.bucketize(maps[0], offsets, right=True).int().clamp(max=E - 1)
    activation, weight = "swiglu" if gated else "silu", torch.rand(T, K).to(dtype).float()
    dy = torch.randn(T, M).to(dtype)
    exact = [value.detach().double().requires_grad_() for value in (weight, *given)]
    rows = naive.dispatch(exact[1], *maps)
    out = ops.expert_ffn(rows, *exact[2:], activation=activation, offsets=offsets)
    want = naive.combine(out, maps[0], exact[0])
    want.backward(dy.double())
    backend(way)
    x, *params = given
    how = {
        "options": ops.FFNOptions(activation, (0.0, 0.0)),
        "memory": ops.ActivationMemory(memory),
    }
    weight.requires_grad_()
    got = ops.routed_ffn(x, weight, *maps, expert_TK, *params, offsets=offsets, **how)
    got.backward(dy)
    assert_close("y", got, want, dtype)
    names = "weight", "x", "w1", "b1", "w2", "b2"
    for name, value, reference in zip(names, (weight, *given), exact, strict=True):
        assert_close(name, value.grad, reference.grad, dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("network", ["ffn", "swiglu"])
def test_a_layer_with_and_without_written_rows(network, backend, monkeypatch):
    """Equal to fp32's rounding; wide experts, and a hook that wants the rows, get them written."""
    backend("triton")
    layer = MoELayer(M, E, F, top_k=K, capacity_factor=0.0, seed=1, expert_network=network)
    x = torch.randn(T, M)
    assert operator.gathers_tokens(x, layer.experts.fc1_weight)
    gathered = run(layer, x, x)
    monkeypatch.setattr(operator, "_WIDEST", F - 1)
    for name, want in run(layer, x, x).items():
        assert_close(name, gathered[name], want, torch.float32)
    monkeypatch.setattr(operator, "_WIDEST", 2 * F)
    seen = []
    layer.experts.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    run(layer, x, x)
    assert seen == [T * K]


@pytest.mark.parametrize("keep", ["fast same", "minimal same", "lean same", "lean fp8", ""])
@pytest.mark.parametrize("is_routed", [True, False])
def test_registered_operator(is_routed, keep):
    given, maps, offsets = routed(False, "cpu", torch.float32)
    x, *params = given
    pairs = torch.rand(T, K, requires_grad=True), *maps, torch.zeros(T, K, dtype=torch.int32)
    if not is_routed:
        x, pairs = torch.randn(int(offsets[-1]), M, requires_grad=True), (None,) * 4
    how = "gelu", 0.0, 0.0, False, False, False, keep
    tests = ["test_schema", "test_faketensor"]
    if keep and (is_routed or keep == "fast same"):
        tests.append("test_autograd_registration")
    args = x, *pairs, *params, offsets, None, *how
    torch.library.opcheck(torch.ops.fairseq_tutel.expert_ffn.default, args, test_utils=tests)


NEW_FORMATS = {"e5m2": ("float8_e5m2", True, 1 + 4 / F), "half": ("bfloat16", False, 2)}


@pytest.mark.parametrize("name", NEW_FORMATS)
def test_a_format_of_kept_values_is_one_entry_of_a_table(name, monkeypatch):
    """It is kept so, restored, known to fake tensors and counted."""
    dtype, scaled, num_bytes = NEW_FORMATS[name]
    monkeypatch.setitem(STORED_FORMATS, name, StoredFormat("", dtype, scaled))
    given, maps, offsets = routed(False, "cpu", torch.float32)
    pairs = torch.rand(T, K), *maps, torch.zeros(T, K, dtype=torch.int32)
    results = []
    for memory in (ops.ActivationMemory(), ops.ActivationMemory("lean", name)):
        how = {"options": ops.FFNOptions("gelu", (0.0, 0.0)), "memory": memory}
        y = ops.routed_ffn(given[0], *pairs, *given[1:], offsets=offsets, **how)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), given)])
    assert torch.equal(results[0][0], results[1][0])
    off = [rms_ratio(b, a) for a, b in zip(*(each[1:] for each in results), strict=True)]
    assert 1e-4 < max(off) < torch.finfo(getattr(torch, dtype)).eps
    assert memory.stored_bytes(4) == int(num_bytes)
    how = "gelu", 0.0, 0.0, False, False, False, str(memory)
    args = given[0], *pairs, *given[1:], offsets, None, *how
    kept = torch.ops.fairseq_tutel.expert_ffn(*args)[2:4]
    assert sum(x.nbytes for x in kept) == len(maps[1]) * F * num_bytes
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.fairseq_tutel.expert_ffn.default, args, test_utils=tests)


def test_refusals():
    given, maps, offsets = routed(False, "cpu", torch.float32)
    x, *params = given
    how = {
        "options": ops.FFNOptions("silu", (0.0, 0.0)),
        "memory": ops.ActivationMemory(),
        "offsets": offsets,
    }
    pairs = torch.rand(T, K), *maps, torch.zeros(T, K, dtype=torch.int32), *params
    with pytest.raises(ValueError, match=r"x must be \(7, model_dim\)"):
        ops.routed_ffn(x[:-1], *pairs, **how)
    with pytest.raises(ValueError, match="src_pair must be"):
        ops.routed_ffn(x, *pairs[:2], maps[1].long(), *pairs[3:], **how)
