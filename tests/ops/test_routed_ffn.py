"""Dispatch, experts and combine as one operator. Numbers: test_product.py."""

import importlib

import pytest
import torch
from helpers.assertions import assert_close, rms_ratio
from helpers.layers import run

from fairseq_tutel import ops
from fairseq_tutel.config import STORED_FORMATS
from fairseq_tutel.config.formats import StoredFormat
from fairseq_tutel.moe import MoELayer

operator = importlib.import_module("fairseq_tutel.ops.expert_ffn")  # a function has its name
T, K, E, M, F = 7, 3, 4, 8, 16


def routed():
    """Tokens, parameters, pairs and offsets: one expert has no rows, one pair is dropped."""
    expert_TK = torch.randint(3, (T, K))
    expert_TK[2, 1] = -1
    order = expert_TK.flatten().argsort(stable=True)[1:]  # without the dropped pair
    src_pair = torch.cat([order, torch.full((2,), -1)]).int()  # and two rows of nobody
    dest_row = torch.full((T * K,), -1, dtype=torch.int32)
    dest_row[order] = torch.arange(len(order), dtype=torch.int32)
    count_E = torch.bincount(expert_TK.flatten()[order], minlength=E)
    shapes = ((T, M), (E, F, M), (E, F), (E, M, F), (E, M))
    x, *params = (torch.randn(shape).requires_grad_() for shape in shapes)
    pairs = torch.rand(T, K), dest_row.view(T, K), src_pair, torch.zeros(T, K, dtype=torch.int32)
    return x, params, pairs, count_E.cumsum(0).int()


@pytest.mark.interpreted
def test_a_layer_with_and_without_written_rows(backend, monkeypatch):
    """Equal to fp32's rounding; wide experts, and a hook that wants the rows, get them written."""
    backend("triton")
    layer = MoELayer(M, E, F, top_k=K, capacity_factor=0.0, seed=1, expert_network="swiglu")
    x = torch.randn(T, M)
    assert operator.gathers_tokens(x, layer.experts.fc1_weight)
    gathered = run(layer, x, x)
    monkeypatch.setattr(operator, "_WIDEST", F - 1)
    for name, want in run(layer, x, x).items():
        assert_close(name, gathered[name], want, torch.float32)


def check_registered(x, pairs, params, offsets, keep, *tests, p=0.0):
    how = "gelu", p, p, False, False, False, keep
    args = (x, *pairs, *params, offsets, torch.tensor(3) if p else None, *how)
    # not test_aot_dispatch_dynamic: it adds up all outputs, and the second one has no gradient
    names = ["test_schema", "test_faketensor", *tests]
    torch.library.opcheck(torch.ops.fairseq_tutel.expert_ffn.default, args, test_utils=names)
    return args, torch.ops.fairseq_tutel.expert_ffn(*args)


@pytest.mark.parametrize("keep", ["fast same", "minimal same", "lean same", "lean fp8", ""])
@pytest.mark.parametrize("is_routed", [True, False])
def test_registered_operator(is_routed, keep):
    x, params, pairs, offsets = routed()
    pairs[0].requires_grad_()
    if not is_routed:  # outputs are contiguous also if the rows are not
        x = torch.randn(M, int(offsets[-1])).t().requires_grad_()
        pairs = (None,) * 4
    differentiable = keep and (is_routed or keep == "fast same")
    more = ["test_autograd_registration"] if differentiable else []
    args, (y, *saved) = check_registered(x, pairs, params, offsets, keep, *more, p=0.1)
    assert y.is_contiguous()
    if differentiable and keep != "lean fp8":  # torch cannot compare its results
        args = [each.detach() if torch.is_tensor(each) else each for each in args]
        for needs in ((True, is_routed, True), (True, False, False), (False, False, True)):
            call = (torch.randn_like(y), *(each.detach() for each in saved), *args, *needs)
            torch.library.opcheck(torch.ops.fairseq_tutel.expert_ffn_bwd.default, call)


NEW_FORMATS = {"e5m2": ("float8_e5m2", True, 1 + 4 / F), "half": ("bfloat16", False, 2)}


@pytest.mark.parametrize("name", NEW_FORMATS)
def test_a_format_of_kept_values_is_one_entry_of_a_table(name, monkeypatch):
    """It is kept so, restored, known to fake tensors and counted."""
    dtype, scaled, num_bytes = NEW_FORMATS[name]
    monkeypatch.setitem(STORED_FORMATS, name, StoredFormat("", dtype, scaled))
    x, params, pairs, offsets = routed()
    results = []
    for memory in (ops.ActivationMemory(), ops.ActivationMemory("lean", name)):
        how = {"options": ops.FFNOptions("gelu", (0.0, 0.0)), "memory": memory}
        y = ops.routed_ffn(x, *pairs, *params, offsets=offsets, **how)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *params])])
    assert torch.equal(results[0][0], results[1][0])
    off = [rms_ratio(b, a) for a, b in zip(*(each[1:] for each in results), strict=True)]
    assert 1e-4 < max(off) < torch.finfo(getattr(torch, dtype)).eps
    assert memory.stored_bytes(4) == int(num_bytes)
    kept = check_registered(x, pairs, params, offsets, str(memory))[1][2:4]
    assert sum(each.nbytes for each in kept) == len(pairs[2]) * F * num_bytes
