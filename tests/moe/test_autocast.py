"""Under torch.autocast the experts compute in half, and the gate's logits and losses stay fp32."""

import pytest
import torch
from helpers.assertions import rms_ratio

from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.router import split_product


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


@pytest.mark.parametrize(("half", "error"), [(torch.bfloat16, 1e-4), (torch.float16, 1e-5)])
def test_split_product_is_more_exact_than_one_product_of_halves(half, error):
    torch.manual_seed(0)
    wide, other = torch.randn(33, 64), torch.randn(64, 17).to(half)
    exact = wide.double() @ other.double()
    # each product is rounded to half once at its end, so compare with products kept in fp32
    high = wide.to(half)
    low = (wide - high.float()).to(half)
    kept = high.double() @ other.double() + low.double() @ other.double()
    assert rms_ratio(kept, exact) < error
    rounding = torch.finfo(half).eps
    assert rms_ratio(split_product(wide, other).double(), exact) < rounding
