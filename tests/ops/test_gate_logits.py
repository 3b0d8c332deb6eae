"""The gate's product: equal to a plain product, exact from halves, gradients, refusals."""

import importlib
import types

import pytest
import torch
from helpers.assertions import assert_close, rms_ratio
from helpers.dispatched import spied
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck

from fairseq_tutel import ops
from fairseq_tutel.ops import backend


def tensors(T):
    generator = torch.Generator().manual_seed(T)
    given = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(shape, **given).requires_grad_() for shape in ((T, 6), (4, 6))]


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_product_gradients_and_frozen_arguments(tokens):
    x, w = tensors(tokens)
    assert_close("logits", ops.gate_logits(x, w), x @ w.t(), torch.float64)
    assert gradcheck(ops.gate_logits, (x, w))
    assert gradcheck(lambda x: ops.gate_logits(x, w.detach()), x)
    assert gradcheck(lambda w: ops.gate_logits(x.detach(), w), w)


# what one product with the wide operand rounded to half is wrong by is about 0.4 eps
SPLIT_ERROR = {torch.bfloat16: 2e-5, torch.float16: 1e-6}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
INTERPRETED = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreted), GPU]
)


@pytest.fixture
def matrix_units(monkeypatch):
    """The GPU's way; without a GPU its products are computed in fp32 instead."""
    monkeypatch.setattr(backend, "_requested", "triton")
    return importlib.import_module("fairseq_tutel.backends.triton.gate_logits")


def leaves(half, device, weight_dtype, tokens=32):
    torch.manual_seed(0)
    x = torch.randn(tokens, 64).to(half).to(device).requires_grad_()
    w = torch.randn(8, 64).div(8).to(weight_dtype).to(device).requires_grad_()
    return x, w


def assert_rounded_once(got, exact, device, half):
    """As exact as the exact gradient in half; the interpreter truncates to bf16."""
    limit = 2.1 if device == "cpu" and half == torch.bfloat16 else 1.01
    assert rms_ratio(got, exact) < limit * rms_ratio(exact.to(got.dtype), exact) + SPLIT_ERROR[half]


@INTERPRETED
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e7])  # fp16 ends at 6e-8 and 65504
@pytest.mark.parametrize("wide", [False, True], ids=["half weight", "fp32 weight"])
@pytest.mark.parametrize("half", SPLIT_ERROR, ids=str)
def test_halves_are_nearly_exact(half, wide, scale, device, matrix_units):
    """Tokens are half; the weight has their dtype, or fp32 as under autocast."""
    x, w = leaves(half, device, torch.float32 if wide else half)
    logits = ops.gate_logits(x, w)
    want = x.double() @ w.double().t()
    assert logits.dtype == torch.float32 and rms_ratio(logits, want) < SPLIT_ERROR[half]
    d = scale * torch.randn_like(logits)
    scaled = d.double() / scale  # so that a half can hold the gradients at all
    logits.backward(d)
    if wide:
        assert w.grad.dtype == torch.float32
        assert rms_ratio(w.grad.double() / scale, scaled.t() @ x.double()) < SPLIT_ERROR[half]
    if scale == 1.0:
        assert x.grad.dtype == half and w.grad.dtype == w.dtype
        assert_rounded_once(x.grad, scaled @ w.to(half).double(), device, half)
        assert_rounded_once(w.grad, scaled.t() @ x.double(), device, half)


@pytest.mark.interpreted
@pytest.mark.parametrize("half", SPLIT_ERROR, ids=str)
def test_overflows_zeros_and_no_tokens(half, matrix_units):
    """A loss scaler has to see overflows."""
    for bad, tokens in ((torch.inf, 32), (torch.nan, 32), (0.0, 0), (0.0, 4)):
        x, w = leaves(half, "cpu", torch.float32 if bad else half, tokens=tokens)
        d = torch.zeros(tokens, 8)
        d[1:2, 2] = bad
        ops.gate_logits(x, w).backward(d)
        if bad:
            assert not x.grad[1].isfinite().any() and not w.grad[2].isfinite().any()
        else:
            assert x.grad.shape == x.shape and not x.grad.any() and not w.grad.any()


@pytest.mark.interpreted
@pytest.mark.parametrize("half", SPLIT_ERROR, ids=str)
@pytest.mark.parametrize("case", ["torch before 2.8", "ROCm", "sums in fp16", "usual"])
def test_where_torch_has_no_wide_sums_of_halves(case, half, matrix_units, monkeypatch):
    """``torch.mm(..., out_dtype=)`` of torch 2.8; it raises on ROCm, and with fp16 sums."""
    monkeypatch.setattr(matrix_units, "_MM_WIDENS", case != "torch before 2.8")
    monkeypatch.setattr(torch.version, "hip", "7.0" if case == "ROCm" else None)
    options = types.SimpleNamespace(allow_fp16_accumulation=case == "sums in fp16")
    monkeypatch.setattr(torch.backends.cuda, "matmul", options)
    wide = spied(monkeypatch, torch, "mm")
    with FakeTensorMode():
        a = torch.empty(3, 4, dtype=half, device="cuda")
        assert matrix_units._product_fp32(a, a.t()).dtype == torch.float32
    assert len(wide) == (case == "usual" or (case == "sums in fp16" and half == torch.bfloat16))


@INTERPRETED
@pytest.mark.parametrize("frozen", ["", "tokens", "weight"])
@pytest.mark.parametrize("half", SPLIT_ERROR, ids=str)
def test_the_gate_adds_to_the_gradient_of_the_tokens(half, frozen, device, matrix_units):
    """Against fp64; in place without a frozen argument, and rounded once."""
    x, w = leaves(half, device, torch.float32 if half == torch.float16 else half)
    x.requires_grad_(frozen != "tokens"), w.requires_grad_(frozen != "weight")
    logits, tokens = ops.gate_logits_and_tokens(x, w)
    assert (tokens is None) == (frozen == "tokens")
    d, dy = torch.randn_like(logits), torch.randn_like(x)
    count = 1 if tokens is None else 2
    torch.autograd.backward([logits, tokens][:count], [d, dy.clone()][:count])
    if x.requires_grad:
        exact = d.double() @ w.to(half).double() + dy.double()
        assert_rounded_once(x.grad, exact, device, half)
    if w.requires_grad:
        assert_rounded_once(w.grad, d.double().t() @ x.double(), device, half)


@pytest.mark.interpreted
def test_unused_tokens_and_second_derivatives(matrix_units):
    x, w = leaves(torch.bfloat16, "cpu", torch.bfloat16)
    logits, tokens = ops.gate_logits_and_tokens(x, w)
    logits.sum().backward()
    exact = w.double().sum(0).expand_as(x)
    assert rms_ratio(x.grad, exact) < 1e-2
    logits, tokens = ops.gate_logits_and_tokens(x, w)
    (grad,) = torch.autograd.grad(logits.sum() + tokens.square().sum(), x, create_graph=True)
    assert rms_ratio(grad, exact + 2 * x.double()) < 1e-2
    with pytest.raises(RuntimeError, match="gate_logits_bwd.* no autograd formula"):
        grad.sum().backward()
