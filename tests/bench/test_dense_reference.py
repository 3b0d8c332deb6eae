"""The dense formulation computes what the sparse layer does, outputs and every gradient."""

import pytest
import torch
from dense_reference import DenseMoE
from helpers.assertions import assert_close
from torch.utils.flop_counter import FlopCounterMode

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

CASES = [
    pytest.param(64, 8, 2, 1.0, 0, id="top2"),
    pytest.param(37, 4, 1, 1.0, 0, id="top1-odd"),  # T is no multiple of E
    pytest.param(37, 5, 3, 2.0, 0, id="top3-all-kept"),
    pytest.param(40, 4, 2, 0.5, 0, id="half-dropped"),  # first and second choices are dropped
    pytest.param(9, 3, 3, 1.0, 0, id="K=E"),
    pytest.param(48, 8, 2, 1.0, 4, id="simulated"),  # several local experts, rows of all ranks
]


def run(module, layer, x, dy):
    """Output, aux loss and gradients of input and all parameters, by name."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y, aux = module(x, return_aux=True)
    torch.autograd.backward((y, aux.loss), (dy, torch.tensor(0.3, dtype=aux.loss.dtype)))
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"y": y, "loss": aux.loss, "dx": x.grad, **grads}, aux


@pytest.mark.parametrize("tokens, experts, top_k, factor, ranks", CASES)
def test_equals_layer(tokens, experts, top_k, factor, ranks):
    torch.manual_seed(1)
    groups = build_groups(experts, simulate_world_size=ranks)
    options = {"top_k": top_k, "capacity_factor": factor, "groups": groups}
    layer = MoELayer(12, experts, 20, **options).double()
    x, dy = torch.randn(2, tokens, 12, dtype=torch.float64)
    want, want_aux = run(layer, layer, x, dy)
    got, aux = run(DenseMoE(layer), layer, x, dy)
    for name in want:
        assert want[name].abs().max() > 0, name
        assert_close(name, got[name], want[name], torch.float64)
    assert aux.load_E.tolist() == want_aux.load_E.tolist()
    if factor < 1:
        assert (want["y"] == 0).all(dim=1).any(), "no token was dropped: the case tests nothing"


@pytest.mark.parametrize(
    "options, named",
    [
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"second_expert_policy": "random"}, "second_expert_policy='random'"),
        ({"input_jitter": 0.1}, "input_jitter=0.1"),
    ],
)
def test_refuses_unknown_options(options, named):
    with pytest.raises(ValueError, match=named):
        DenseMoE(MoELayer(8, 4, 8, **options))


def test_dispatch_by_masks_grows_with_the_square():
    """Operations as torch counts them, without those of the experts, which both have."""

    def operations(layer, tokens):
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(tokens, 16))
        return counter.get_total_flops()

    ours = MoELayer(16, 4, 32, capacity_factor=1.0)
    assert operations(ours, 512) <= 2 * operations(ours, 256)
    extra = [operations(DenseMoE(ours), n) - operations(ours, n) for n in (256, 512)]
    assert extra[1] == 4 * extra[0] > 0
