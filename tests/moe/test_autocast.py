"""Under torch.autocast the experts compute in half, and the gate's logits and losses stay fp32."""

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.routing import route
from torch import nn

from fairseq_tutel import ops
from fairseq_tutel.moe import MoEConfig, MoELayer, make_router
from fairseq_tutel.moe.routers import linear
from fairseq_tutel.moe.routers.linear import split_product


@pytest.mark.parametrize("factor", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(factor, dtype):
    torch.manual_seed(0)
    layer = MoELayer(16, 4, 32, capacity_factor=factor)
    x = torch.randn(24, 16).bfloat16().to(dtype)
    expected, plain = layer(x.float(), return_aux=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = layer(x, return_aux=True)
    assert y.dtype == torch.bfloat16
    assert aux.loss.dtype == torch.float32
    # the gate sees the same numbers, so it decides alike to fp32 rounding
    torch.testing.assert_close(aux.loss, plain.loss, rtol=1e-5, atol=0)
    assert torch.equal(aux.load_E, plain.load_E)
    assert rms_ratio(y, expected) < 2e-2
    (y.float().square().sum() + aux.loss).backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.fixture
def backend():
    before = ops.get_backend()
    yield ops.set_backend
    ops.set_backend(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_custom_gate_runs_under_the_callers_autocast(dtype):
    """An nn.Linear with fp32 weights takes the tokens of either dtype, as it does elsewhere."""
    torch.manual_seed(0)
    seen = []

    class Gate(nn.Linear):
        def forward(self, x_TM):
            seen.append((x_TM.dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(x_TM)

    layer = MoELayer(16, 4, 32, gate=Gate(16, 4))
    x = torch.randn(24, 16).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = layer(x, return_aux=True)
    assert seen == [(dtype, True)]
    assert y.dtype == torch.bfloat16 and aux.loss.dtype == torch.float32
    (y.float().square().sum() + aux.loss).backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_custom_gate_in_a_half_model(name, backend):
    """Its logits are bf16; the softmax and the losses of these numbers are fp32."""
    backend(name)
    torch.manual_seed(0)
    layer = MoELayer(16, 4, 32, gate=nn.Linear(16, 4), z_loss_weight=0.1).bfloat16()
    x = torch.randn(24, 16).bfloat16()
    y, aux = layer(x, return_aux=True)
    assert y.dtype == torch.bfloat16 and aux.loss.dtype == torch.float32
    (y.float().square().sum() + aux.loss).backward()
    assert layer.gate.weight.grad.any() and layer.gate.weight.grad.dtype == torch.bfloat16
    backend("torch")  # for fp64
    _, wanted = route(layer.gate(x).detach().double(), layer.config, training=True)
    torch.testing.assert_close(aux.loss.double(), wanted.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_route_computes_in_fp32_at_least(dtype):
    logits = torch.randn(24, 4).to(dtype).requires_grad_()
    routing, aux = route(logits, MoEConfig(num_experts=4), training=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.topk_weight_TK.dtype == aux.loss.dtype == wide
    (routing.topk_weight_TK.square().sum() + aux.loss).backward()
    assert logits.grad.dtype == dtype


# what one product with the wide operand rounded to half is wrong by is about 0.4 eps
SPLIT_ERROR = {torch.bfloat16: 1e-5, torch.float16: 1e-6}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e7])  # fp16 ends at 6e-8 and 65504
@pytest.mark.parametrize("half", SPLIT_ERROR)
def test_split_product_is_nearly_exact(half, scale, device):
    torch.manual_seed(0)
    wide = (scale * torch.randn(33, 64)).to(device)
    other = torch.randn(64, 16).to(half).to(device)
    exact = wide.double() @ other.double()
    got = split_product(wide, other)
    assert got.dtype == torch.float32
    assert rms_ratio(got, exact) < SPLIT_ERROR[half]
    largest = wide.abs().max()  # so that fp16 can hold it at all
    one_product = (wide / largest).to(half).double() @ other.double() * largest
    assert rms_ratio(one_product, exact) > 10 * SPLIT_ERROR[half]
    # with the operands' places changed
    assert rms_ratio(split_product(other.t(), wide.t()), exact.t()) < SPLIT_ERROR[half]


@pytest.mark.parametrize("half", SPLIT_ERROR)
def test_split_product_of_odd_operands(half):
    """Zeros, no rows, no inner dimension, and an overflow that a loss scaler has to see."""
    other = torch.randn(4, 3).to(half)
    assert torch.equal(split_product(torch.zeros(2, 4), other), torch.zeros(2, 3))
    assert split_product(torch.zeros(0, 4), other).shape == (0, 3)
    assert torch.equal(split_product(torch.zeros(2, 0), other[:0]), torch.zeros(2, 3))
    for bad in (torch.inf, torch.nan):
        wide = torch.ones(2, 4)
        wide[1, 2] = bad
        assert not split_product(wide, other)[1].isfinite().any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("half", SPLIT_ERROR)
def test_fp32_weight_of_the_gate_keeps_its_digits(half, device, monkeypatch):
    """On half tokens, as under autocast; without a GPU by the product that runs on one."""
    if device == "cpu":
        monkeypatch.setattr(linear, "_product_of", lambda tokens: split_product)
    torch.manual_seed(0)
    gate = make_router(64, MoEConfig(num_experts=8)).to(device)
    x = torch.randn(96, 64).to(half).to(device).requires_grad_()
    logits = gate.logits(x)
    want = x.double() @ gate.wg.weight.double().t()
    assert logits.dtype == torch.float32 and rms_ratio(logits, want) < SPLIT_ERROR[half]
    grad = 1e-3 * torch.randn_like(logits)
    logits.backward(grad)
    assert gate.wg.weight.grad.dtype == torch.float32 and x.grad.dtype == half
    assert rms_ratio(gate.wg.weight.grad, grad.double().t() @ x.double()) < SPLIT_ERROR[half]
    exact = grad.double() @ gate.wg.weight.to(half).double()
    # rounded once: as exact as the exact gradient in half
    assert rms_ratio(x.grad, exact) < 1.01 * rms_ratio(exact.to(half), exact)
