"""Under torch.autocast the experts compute in half, and the gate's logits and losses stay fp32."""

import pytest
import torch
from helpers.assertions import assert_close
from helpers.routing import route
from torch import nn

from fairseq_tutel.moe import MoELayer


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


def test_custom_gate_in_a_half_model():
    """Its logits are bf16; the softmax and the losses of these numbers are fp32."""
    torch.manual_seed(0)
    layer = MoELayer(16, 4, 32, gate=nn.Linear(16, 4), z_loss_weight=0.1).bfloat16()
    x = torch.randn(24, 16).bfloat16()
    y, aux = layer(x, return_aux=True)
    assert y.dtype == torch.bfloat16 and aux.loss.dtype == torch.float32
    (y.float().square().sum() + aux.loss).backward()
    assert layer.gate.weight.grad.any() and layer.gate.weight.grad.dtype == torch.bfloat16
    _, wanted = route(layer.gate(x).detach().double(), layer.config, training=True)
    assert_close("aux loss", aux.loss, wanted.loss, torch.float32)
