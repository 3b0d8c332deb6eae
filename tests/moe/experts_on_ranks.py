"""Experts on four ranks against the same layer with all experts and all tokens."""

import torch
from helpers import naive
from helpers.assertions import assert_same_state

from fairseq_tutel import training
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import (
    ExpertParallelGroups,
    build_groups,
    process_world,
    without_held_experts,
)


def gradients(experts):
    """Of each expert's parameters, under their names in a state dict."""
    names = experts.single_names()
    return {
        single: part
        for name, param in experts.named_parameters()
        if param.requires_grad
        for single, part in zip(names[name], param.grad, strict=True)
    }


def by_hand(layer, x, expert, state=None):
    """In fp64: the layer of ``helpers.naive`` with ``expert(x, its state)``."""
    state = state or {name: value.double() for name, value in layer.state_dict().items()}
    starts = [f"experts.{e}." for e in range(layer.groups.num_experts)]
    own = [{k.removeprefix(s): v for k, v in state.items() if k.startswith(s)} for s in starts]
    gate = state["gate.wg.weight"]
    return naive.layer(x, gate, lambda x, e: expert(x, own[e]), layer.config, layer.training)[0]


def check_on_ranks(make, model_dim, cases, folder):
    """Each (experts, placement, r, degree) is as in one process, and comes back from a set.

    A case may have further options of the exchange, with which ranks help each other. Gradients:
    test_product.py.
    """
    rank, world_size = process_world()
    x = torch.randn(24, model_dim, generator=torch.Generator().manual_seed(1)).double()
    mine = slice(rank * 24 // world_size, (rank + 1) * 24 // world_size)
    for experts, placement, r, degree, *more in cases:
        whole_y = make(experts, ExpertParallelGroups(experts))(x)
        groups = build_groups(experts, placement=placement)
        exchange = ExchangeConfig("linear", overlap_degree=degree, r=r, **dict(*more))
        layer = make(experts, groups, exchange=exchange)
        y, aux = layer(x[mine], return_aux=True)
        if more:
            helped = torch.tensor(aux.record.rows_helped)
            torch.distributed.all_reduce(helped)
            assert helped > 0
        torch.testing.assert_close(y, whole_y[mine])
        y.square().sum().backward()
        whole = make(experts, ExpertParallelGroups(experts), seed=9)
        whole.load_state_dict(training.full_state_dict(layer) or whole.state_dict())
        assert rank or torch.equal(whole(x), whole_y)
        # of experts alone: nothing here averages the gate's gradients
        layer.gate.requires_grad_(False)
        training.reduce_expert_grads(layer.experts.parameters(), groups)
        optimizer = torch.optim.Adam(layer.experts.parameters())
        optimizer.step()
        training.save_checkpoint(f"{folder}/x.pt", layer, optimizer)
        other = make(experts, groups, seed=9, exchange=exchange)
        fresh = torch.optim.Adam(other.experts.parameters())
        training.load_checkpoint(f"{folder}/x.pt", other, fresh)
        assert_same_state(*(without_held_experts(each.state_dict()) for each in (other, layer)))
        assert_same_state(*(each.state_dict()["state"] for each in (fresh, optimizer)))
