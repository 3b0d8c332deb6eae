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


GATES = {
    "linear": lambda: nn.Linear(M, E),
    "module": TwoLayers,
    "router": lambda: LinearRouter(M, MoEConfig(num_experts=E, capacity_factor=0.0)),
}


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
def test_state_dicts_name_a_gate_as_it_names_itself(name):
    gate = GATES[name]()
    own = gate.state_dict()
    layer = make(gate)
    of_gate = {k: v for k, v in layer.state_dict().items() if k.startswith("gate.")}
    assert of_gate.keys() == {f"gate.{key}" for key in own}
    assert layer.gate is gate
    assert {n for n, _ in layer.named_parameters() if n.startswith("gate.")} == {
        f"gate.{n}" for n, _ in gate.named_parameters()
    }
    other = make(GATES[name]())
    other.load_state_dict(layer.state_dict())
    x = torch.randn(9, M)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("wrap", [Wrapper, checkpoint_wrapper])
def test_a_gate_that_is_wrapped_later_routes_as_before(name, wrap):
    layer, x, seen = make(GATES[name]()), torch.randn(9, M), []
    layer.gate.register_forward_hook(lambda *call: seen.append(call))
    y = layer(x)
    assert len(seen) == 1
    y.square().sum().backward()
    want = {id(param): param.grad.clone() for param in layer.parameters()}
    layer.zero_grad()
    layer.gate = wrap(layer.gate)
    again = layer(x)
    again.square().sum().backward()
    assert torch.equal(again, y)
    for param in layer.parameters():
        torch.testing.assert_close(param.grad, want[id(param)])


def test_a_router_without_reports_is_named():
    class Silent(LinearRouter):
        def forward(self, x_TM, pad_mask_T, call):
            return super().forward(x_TM, pad_mask_T, call)[0], None

    layer = make(Silent(M, MoEConfig(num_experts=E, capacity_factor=0.0)))
    assert layer(torch.randn(3, M)).shape == (3, M)
    with pytest.raises(ValueError, match="the router returned None in place of RouterAux"):
        layer(torch.randn(3, M), return_aux=True)


@pytest.mark.parametrize("case", ["fp32 tokens", "bf16 tokens", "half model"])
def test_custom_gate_in_half_precision(case):
    """An nn.Linear runs under the caller's autocast, or is half; softmax and losses are fp32."""
    torch.manual_seed(0)
    autocast, seen = case != "half model", []

    class Gate(nn.Linear):
        def forward(self, x_TM):
            seen.append((x_TM.dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(x_TM)

    layer = MoELayer(16, 4, 32, gate=Gate(16, 4), z_loss_weight=0.1)
    layer = layer if autocast else layer.bfloat16()
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
