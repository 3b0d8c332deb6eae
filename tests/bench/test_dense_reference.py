"""The dense formulation computes what the sparse layer does, outputs and every gradient."""

import measure
import pytest
import torch
from dense_reference import DenseMoE, gating, memory_need
from helpers.assertions import assert_close

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

CASES = [
    pytest.param(64, 8, 2, 1.0, False, id="top2"),
    pytest.param(64, 8, 2, 1.0, True, id="top2-expert-loop"),
    pytest.param(37, 4, 1, 1.0, False, id="top1-odd"),  # T is no multiple of E
    pytest.param(37, 5, 3, 2.0, False, id="top3-all-kept"),
    pytest.param(40, 4, 2, 0.5, False, id="half-dropped"),  # first and second choices are dropped
    pytest.param(9, 3, 3, 1.0, False, id="K=E"),
]


def run(module, layer, x, dy):
    """Output, aux loss and gradients of input and all parameters, by name."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y, aux = module(x, return_aux=True)
    torch.autograd.backward((y, aux.loss), (dy, torch.tensor(0.3, dtype=aux.loss.dtype)))
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"y": y, "loss": aux.loss, "dx": x.grad, **grads}, aux


@pytest.mark.parametrize("tokens, experts, top_k, factor, loop", CASES)
def test_equals_layer(tokens, experts, top_k, factor, loop):
    torch.manual_seed(1)
    layer = MoELayer(12, experts, 20, top_k=top_k, capacity_factor=factor).double()
    x, dy = torch.randn(2, tokens, 12, dtype=torch.float64)
    want, want_aux = run(layer, layer, x, dy)
    got, aux = run(DenseMoE(layer, expert_loop=loop), layer, x, dy)
    for name in want:
        assert want[name].abs().max() > 0, name
        assert_close(name, got[name], want[name], torch.float64)
    assert aux.load_E.tolist() == want_aux.load_E.tolist()
    if factor < 1:
        assert (want["y"] == 0).all(dim=1).any(), "no token was dropped: the case tests nothing"


def test_equals_layer_of_a_simulated_rank():
    """Several local experts with the rows of all ranks: the order at the wire is the same."""
    torch.manual_seed(1)
    groups = build_groups(8, simulate_world_size=4)
    layer = MoELayer(12, 8, 20, groups=groups).double()
    x, dy = torch.randn(2, 48, 12, dtype=torch.float64)
    want, _ = run(layer, layer, x, dy)
    got, _ = run(DenseMoE(layer), layer, x, dy)
    for name in want:
        assert_close(name, got[name], want[name], torch.float64)


def test_combine_weights_by_hand():
    """Expert 0 is everybody's first choice and holds one token; the other one goes to its second
    expert alone, with weight 1 (gates are normalised over what was kept)."""
    p = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.1, 0.2]])
    combine, loss, load = gating(p.log(), top_k=2, capacity=1)
    want = torch.zeros(2, 3, 1)
    want[0, 0, 0], want[0, 1, 0] = 0.6 / 0.9, 0.3 / 0.9
    want[1, 2, 0] = 1.0
    torch.testing.assert_close(combine, want)
    assert load.tolist() == [2, 1, 1]
    # 3 experts * mean probability of expert 0 * share of first choices on it
    assert loss.item() == pytest.approx(3 * 0.65 * 1.0)


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


def test_memory_need_is_what_a_pass_takes():
    """The computed need is a lower bound, and no far one: it decides what is run at all."""
    tokens, experts = 1536, 16
    layer = MoELayer(16, experts, 16)
    dense = DenseMoE(layer)
    x, dy = torch.randn(2, tokens, 16)

    def forward(_):
        return (dense(x),), (dy,)

    case = measure.Case("dense", forward, lambda: list(layer.parameters()))
    measure.peak_memory(case, torch.device("cpu"))  # the first pass also fills pools
    measured = measure.peak_memory(case, torch.device("cpu"))
    if measured is None:
        pytest.skip("the peak resident set cannot be reset on this system")
    capacity = layer.config.capacity(tokens, training=True)
    need = memory_need(tokens, experts, capacity, 4)
    assert 0.9 * need < measured < 2.0 * need
