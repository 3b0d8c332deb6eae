"""A gate is called as a module: names in state dicts, hooks, wrappers, autocast."""

import pytest
import torch
from helpers.assertions import assert_close
from helpers.routing import route
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fairseq_tutel.moe import MoEConfig, MoELayer
from fairseq_tutel.moe.routers import LinearRouter

M, E = 6, 4


class TwoLayers(nn.Module):
    """A gate with submodules and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(M, 5), nn.Linear(5, E, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x_TM):
        return self.scale * self.outer(torch.tanh(self.inner(x_TM)))


DROPLESS = MoEConfig(num_experts=E, capacity_factor=0.0)
GATES = {"module": TwoLayers, "router": lambda: LinearRouter(M, DROPLESS)}


def make(gate):
    torch.manual_seed(0)
    return MoELayer(M, E, 8, gate=gate, capacity_factor=0.0, seed=1)


class Wrapper(nn.Module):
    """Like DistributedDataParallel: the same call, another class."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("wrap", [Wrapper, checkpoint_wrapper])
def test_a_gate_keeps_its_names_and_routes_as_before_if_it_is_wrapped_later(name, wrap):
    gate, x, seen = GATES[name](), torch.randn(9, M), []
    layer, other = make(gate), make(GATES[name]())
    of_gate = {key for key in layer.state_dict() if key.startswith("gate.")}
    assert of_gate == {f"gate.{key}" for key in gate.state_dict()} and layer.gate is gate
    other.load_state_dict(layer.state_dict())
    layer.gate.register_forward_hook(lambda *call: seen.append(call))
    results = []
    for wrapped in (False, True):
        if wrapped:
            layer.gate = wrap(layer.gate)
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        results.append([y, *(param.grad for param in layer.parameters())])
        assert wrapped or len(seen) == 1
    assert torch.equal(y, results[0][0]) and torch.equal(y, other(x))
    torch.testing.assert_close(*results)


def test_a_router_without_reports_is_named():
    class Silent(LinearRouter):
        def forward(self, x_TM, pad_mask_T, call):
            return super().forward(x_TM, pad_mask_T, call)[0], None

    layer = make(Silent(M, DROPLESS))
    assert layer(torch.randn(3, M)).shape == (3, M)
    with pytest.raises(ValueError, match="the router returned None in place of RouterAux"):
        layer(torch.randn(3, M), return_aux=True)


@pytest.mark.parametrize("case", ["fp32 tokens", "bf16 tokens", "half model"])
def test_custom_gate_in_half_precision(case):
    """An nn.Linear runs under the caller's autocast, or is half; softmax and losses are fp32."""
    autocast, seen = case != "half model", []
    layer = MoELayer(16, 4, 32, gate=nn.Linear(16, 4), z_loss_weight=0.1)
    layer = layer if autocast else layer.bfloat16()
    layer.gate.register_forward_hook(
        lambda gate, given, _: seen.append((given[0].dtype, torch.is_autocast_enabled("cpu")))
    )
    x = torch.randn(24, 16).to(torch.float32 if case == "fp32 tokens" else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, aux = layer(x, return_aux=True)
        logits = layer.gate(x).detach().double()
    assert seen[0] == (x.dtype, autocast)
    assert y.dtype == torch.bfloat16 and aux.loss.dtype == torch.float32
    (y.float().square().sum() + aux.loss).backward()
    assert all(p.grad.dtype == p.dtype for p in layer.parameters()) and layer.gate.weight.grad.any()
    _, wanted = route(logits, layer.config, training=True)
    assert_close("aux loss", aux.loss, wanted.loss, torch.float32)
