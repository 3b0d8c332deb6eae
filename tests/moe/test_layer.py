"""The interface of a layer on one rank. Its numbers: test_product.py, test_fuzz.py."""

import gc

import pytest
import torch
from helpers.assertions import assert_close, rms_ratio
from torch import nn

from fairseq_tutel.config import ExpertConfig
from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.moe import MoEConfig, MoELayer
from fairseq_tutel.training import collect_aux

M, HIDDEN, E = 6, 10, 4


def make_layer(dtype=torch.float64, **options):
    torch.manual_seed(1)
    options.setdefault("second_expert_policy", "all")
    layer = MoELayer(M, E, HIDDEN, **options).to(dtype)
    with torch.no_grad():
        layer.gate.wg.weight.mul_(4)  # skewed: some experts overflow
    return layer


def test_a_report_is_short_to_print():
    _, aux = make_layer(null_experts=2)(torch.randn(3, M).double(), return_aux=True)
    nulls = aux.num_null_KN.sum().item()
    assert aux.null_share.item() == pytest.approx(100 * nulls / (3 * 2))
    assert repr(aux).startswith("MoEAux(loss=tensor(") and len(repr(aux)) < 200


def test_a_schedule_of_capacities_keeps_few_configs():
    layer, x = MoELayer(M, 4, HIDDEN).eval(), torch.randn(3, M)

    def configs():
        return sum(type(each) is MoEConfig for each in gc.get_objects())

    before = configs()
    with torch.no_grad():
        for step in range(200):
            layer(x, capacity_factor=1 + step / 100)
    assert configs() - before < 100


def network():
    return nn.Sequential(nn.Linear(M, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, M, bias=False))


def test_a_function_makes_each_expert():
    """The same experts with any number of ranks, however those were seeded; a loop's output."""
    layer = MoELayer(M, E, expert_fn=network, seed=5, top_k=1, capacity_factor=0)
    weights = [expert[0].weight for expert in layer.experts]
    assert not torch.equal(weights[0], weights[1])
    for rank in range(8):
        torch.manual_seed(rank)
        groups = ExpertParallelGroups(E, rank=rank, world_size=8, ep_size=E, num_replicas=2)
        held = MoELayer(M, E, expert_fn=network, seed=5, groups=groups)
        assert torch.equal(held.experts[0][0].weight, weights[groups.local_experts[0]])
    state = torch.manual_seed(0).get_state()
    MoELayer(M, E, expert_fn=network, seed=5, gate=nn.Identity())
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's numbers are drawn
    x = torch.randn(9, M)
    prob = layer.gate.logits(x).softmax(1)
    want = [prob[t].max() * layer.experts[int(prob[t].argmax())](x[t]) for t in range(9)]
    torch.testing.assert_close(layer(x), torch.stack(want))


SWIGLU = {"expert_network": "swiglu", "expert_options": {"bias": True}, "dropout": 0.1}
SHARED = {"shared_expert_dim": 4, "activation": "relu"}


@pytest.mark.parametrize(("experts", "short"), [
    (ExpertConfig(), {}), (ExpertConfig(**SWIGLU), SWIGLU), (ExpertConfig(**SHARED), SHARED),
    (network, {"expert_fn": network}),
])  # fmt: skip
def test_experts_in_one_argument_are_those_of_the_short_forms(experts, short):
    found, wanted = MoELayer(M, E, seed=5, experts=experts), MoELayer(M, E, seed=5, **short)
    assert repr(found) == repr(wanted)
    assert found.state_dict().keys() == wanted.state_dict().keys()
    shared = MoELayer(M, E, experts=network, shared_expert_dim=3, activation="relu", dropout=0.5)
    assert (shared.shared_expert.activation, shared.shared_expert.dropouts) == ("relu", (0.0, 0.5))


@pytest.mark.parametrize("training", [True, False])
def test_top_k_and_capacity_factor_of_one_call(training):
    layer = make_layer(torch.float32, top_k=1, capacity_factor=1.0).train(training)
    x = torch.randn(14, M)
    for options in ({"top_k": 4}, {"capacity_factor": 0.5}, {"top_k": 2, "capacity_factor": 0.0}):
        key = "capacity_factor" if training else "eval_capacity_factor"
        fixed = {key if k == "capacity_factor" else k: v for k, v in options.items()}
        other = make_layer(torch.float32, **{"top_k": 1, "capacity_factor": 1.0, **fixed})
        other.train(training)
        assert torch.equal(layer(x, **options), other(x))
        assert not torch.equal(layer(x, **options), layer(x))
    assert layer.config.top_k == 1 and layer.config.capacity_factor == 1.0


def test_input_dropout_and_jitter_change_training_only():
    x, plain = torch.randn(14, M), make_layer(torch.float32, capacity_factor=0.0)
    for name in ("input_dropout", "input_jitter"):
        layer = make_layer(torch.float32, capacity_factor=0.0, **{name: 0.6})
        assert not torch.allclose(layer(x), plain(x))
        assert torch.equal(layer.eval()(x), plain(x))


def test_jitter_reaches_the_gate_only():
    """Multiplicative, uniform(1-j, 1+j); the experts see the tokens as they are."""
    experts = [nn.Identity() for _ in range(E)]
    layer, seen = MoELayer(M, E, gate=nn.Linear(M, E), experts=experts, input_jitter=0.25), []
    layer.gate.register_forward_pre_hook(lambda gate, given: seen.append(given[0].detach()))
    x = torch.rand(500, M) + 1
    torch.testing.assert_close(layer(x, capacity_factor=0.0), x)
    ratio = seen[0] / x
    assert 0.75 <= ratio.min() < 0.76 and 1.24 < ratio.max() <= 1.25
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.01)


def test_losses_and_counts_are_left_out_where_nobody_reads_them():
    """Output and gradients are the same without; collecting them leaves the layer as it was."""
    x, made = torch.randn(14, M, dtype=torch.float64), []  # whether the router returned them
    layer, quiet = make_layer(top_k=2), make_layer(top_k=2, compute_aux=False)
    for each in (layer, quiet):
        each.gate.register_forward_hook(lambda gate, args, result: made.append(bool(result[1])))
    ys = layer(x), quiet(x), quiet(x, return_aux=True)[0]
    grads = [torch.autograd.grad(y.sum(), [*each.parameters()])
             for y, each in zip(ys, (layer, quiet, quiet), strict=True)]  # fmt: skip
    torch.testing.assert_close([ys[0]] * 2, list(ys[1:]))
    torch.testing.assert_close([grads[0]] * 2, grads[1:])
    with torch.no_grad():
        layer.eval()(x)
    with collect_aux(quiet) as found:
        quiet(x)
    quiet(x)
    assert len(found.layers) == 1 and made == [True, False, True, False, True, False]


@pytest.mark.parametrize("how", ["jit.trace", "functionalize", "vmap"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_small_evaluations_route_in_traces_and_transforms(how):
    """Nothing that the example's values decide is in a trace."""
    layer = make_layer(top_k=2, capacity_factor=0.0).eval()
    example, x = torch.randn(2, 6, M, dtype=torch.float64).unbind()
    if how == "jit.trace":
        call = torch.jit.trace(layer, example)
    elif how == "functionalize":
        call = torch.func.functionalize(layer)
    else:
        call = lambda x: torch.func.vmap(layer)(x.view(3, 2, M)).view_as(x)  # noqa: E731
    assert_close(how, call(x), layer(x), torch.float64)


# expert and final output masking

T, P = 4000, 0.3
MASKS = ("expert_output_masking", "final_output_masking")


def tokens(count=T):
    return torch.randn(count, M, generator=torch.Generator().manual_seed(5)).double()


@pytest.mark.parametrize("factor", [2.0, 0.0, -2.0], ids=["padded", "ragged", "dynamic"])
@pytest.mark.parametrize("name", MASKS)
def test_training_leaves_out_whole_outputs_of_tokens(name, factor):
    """With one expert per token; nothing is scaled. A shared expert is of the final output."""
    x, options = tokens(), {"top_k": 1, "capacity_factor": factor, "shared_expert_dim": 3}
    layer, plain = make_layer(**options, **{name: P}), make_layer(**options)(x)
    y, shared = layer(x), layer.shared_expert(x)
    left = torch.zeros_like(shared) if name == "final_output_masking" else shared
    lost_T = (y - left).abs().amax(1) < 1e-12
    torch.testing.assert_close(y[~lost_T], plain[~lost_T])
    assert lost_T.double().mean() == pytest.approx(P, abs=5 * (P * (1 - P) / T) ** 0.5)


def test_outputs_of_experts_are_left_out_one_by_one():
    """Each of two is there or not, in all four combinations, on their own."""
    layer = make_layer(top_k=2, capacity_factor=0.0, expert_output_masking=P)
    one = tokens(1)
    weights = layer.eval()(one) / (1 - P)  # both
    layer.train()
    found = torch.unique(layer(one.expand(T, M)).round(decimals=9), dim=0, return_counts=True)
    rows, shares = found[0], found[1] / T
    assert len(rows) == 4 and rms_ratio((rows.sum(0) / 2)[None], weights) < 1e-6
    want = sorted([P * P, P * (1 - P), P * (1 - P), (1 - P) ** 2])
    assert shares.sort().values.tolist() == pytest.approx(want, abs=0.04)


def test_evaluation_has_the_expected_value():
    x = tokens(50)
    options = {"expert_output_masking": 0.25, "final_output_masking": 0.5}
    plain, masked = (make_layer(capacity_factor=0.0, **each).eval()(x) for each in ({}, options))
    assert rms_ratio(masked, 0.75 * 0.5 * plain) < 1e-12
