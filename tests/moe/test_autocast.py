"""Under torch.autocast the experts compute in half, and the gate's logits and losses stay fp32."""

import pytest
import torch
from helpers.assertions import assert_close
from helpers.routing import route
from torch import nn

from fairseq_tutel.moe import MoEConfig, MoELayer


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


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
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
    assert_close("aux loss", aux.loss, wanted.loss, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_route_computes_in_fp32_at_least(dtype):
    logits = torch.randn(24, 4).to(dtype).requires_grad_()
    routing, aux = route(logits, MoEConfig(num_experts=4), training=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.topk_weight_TK.dtype == aux.loss.dtype == wide
    (routing.topk_weight_TK.square().sum() + aux.loss).backward()
    assert logits.grad.dtype == dtype
