"""Experts of a user: a network registered by one file, in all hosts and sets; and modules."""

import textwrap

import pytest
import torch
from helpers import naive
from helpers.distributed import on_ranks, run_ranks
from torch import nn
from torch.nn import functional

from fairseq_tutel.config import EXPERTS
from fairseq_tutel.moe import ExpertBank, MoELayer
from fairseq_tutel.moe.experts import base

M, F, TOKENS = 6, 8, 16


def register_documented():
    """In a process of its own: the name and its flags stay where it is registered."""
    text = base.__doc__.split("::\n", 1)[1].split("\nThat is all")[0]
    exec(textwrap.dedent(text), {"__name__": "mine"})


def make(experts, groups=None, seed=3, **options):
    torch.manual_seed(0)
    own = {"expert_network": "mine", "expert_options": {"slope": 0.3}, "capacity_factor": 0.0}
    given = {**own, "activation_memory": "lean", "second_expert_policy": "all", **options}
    return MoELayer(M, experts, F, groups=groups, seed=seed, **given).double()


def formula(x, state):
    hidden = functional.leaky_relu(x @ state["up.weight"].t(), 0.3)
    return hidden @ state["down.weight"].t()


@on_ranks(1)
def test_in_a_layer():
    """On ranks, sliced, gathered, helped, recomputed: ``leaky`` in test_product.py."""
    register_documented()
    for factor in (0.0, 4.0):  # ragged, padded
        layer, x = make(4, capacity_factor=factor), torch.randn(TOKENS, M).double()
        state = layer.state_dict()
        own = [
            {k.partition(f"s.{e}.")[2]: v for k, v in state.items() if f"s.{e}." in k}
            for e in range(4)
        ]
        want, _ = naive.layer(
            x, state["gate.wg.weight"], lambda x, e, own=own: formula(x, own[e]), layer.config
        )
        torch.testing.assert_close(layer(x), want)
    assert EXPERTS.get("mine").count(M, F) == (2 * M * F, 4 * M * F)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(x.float()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="slope=-1.0 must be at least 0"):
        MoELayer(M, 4, F, expert_network="mine", expert_options={"slope": -1.0})


def in_fairseq():
    """In a process of its own: the names that it adds stay."""
    from helpers.training import make_batch, make_config, make_trainer

    register_documented()
    four, slope = ("--moe-expert-count", "4"), ("--moe-mine-slope", "0.5")
    trainer = make_trainer(make_config(*four, "--moe-expert-network", "mine", *slope))
    layer = trainer.get_model().moe_layers[1]
    assert layer.experts.options.slope == 0.5
    before = layer.experts.up_weight.detach().clone()
    trainer.train_step([make_batch(1)])
    assert not torch.equal(layer.experts.up_weight, before)

    cfg = make_config(*four, "--moe-expert-network", "swiglu", "--moe-swiglu-bias")
    assert make_trainer(cfg).get_model().moe_layers[1].experts.fc2_bias is not None
    with pytest.raises(SystemExit, match="--moe-mine-slope 0.5 is an option of another"):
        make_config(*four, *slope)


def test_the_documented_example_in_fairseq():
    pytest.importorskip("fairseq")
    run_ranks(in_fairseq, 1)


def published_expert():
    """Make the expert of a published example of Tutel."""
    return nn.Sequential(nn.Linear(M, F), nn.ReLU(), nn.Linear(F, M))


def test_the_first_linear_layer_says_the_width():
    layer = MoELayer(num_experts=4, expert_fn=published_expert, top_k=2, seed=1)
    assert layer.model_dim == M and len(layer.experts) == 4
    layer(torch.randn(TOKENS, M)).sum().backward()
    assert layer.experts[0][0].weight.grad is not None
    given = MoELayer(M, 4, expert_fn=published_expert, top_k=2, seed=1)
    assert list(given.state_dict()) == list(layer.state_dict())
    assert torch.equal(given.experts[3][0].weight, layer.experts[3][0].weight)
    modules = [published_expert() for _ in range(4)]
    assert MoELayer(num_experts=4, experts=modules).model_dim == M


class Narrow(ExpertBank):
    """A bank of all experts, whose outputs are narrower than the tokens."""

    def forward(self, batch, prepared=None):
        return 2 * batch.rows[..., :2]


def test_a_bank_may_change_the_width():
    layer = MoELayer(M, 4, experts=Narrow(), top_k=2, capacity_factor=0.0)
    x = torch.randn(2, 3, M)
    torch.testing.assert_close(layer(x), 2 * x[..., :2])
