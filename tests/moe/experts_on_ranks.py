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

    A case may have further options of the exchange, with which ranks help each other.
    """
    rank, world_size = process_world()
    x = torch.randn(24, model_dim, generator=torch.Generator().manual_seed(1)).double()
    mine = slice(rank * 24 // world_size, (rank + 1) * 24 // world_size)
    for experts, placement, r, degree, *more in cases:
        case = f"{experts} {placement} {r} {degree}"
        alone, whole_x = make(experts, ExpertParallelGroups(experts)), x.clone().requires_grad_()
        whole_y = alone(whole_x)
        (whole_y * whole_y.detach()).sum().backward()
        want = gradients(alone.experts)

        groups = build_groups(experts, placement=placement)
        exchange = ExchangeConfig("linear", overlap_degree=degree, r=r, **dict(*more))
        layer, given = make(experts, groups, exchange=exchange), x[mine].clone().requires_grad_()
        y, aux = layer(given, return_aux=True)
        if more:
            helped = torch.tensor(aux.record.rows_helped)
            torch.distributed.all_reduce(helped)
            assert helped > 0
        torch.testing.assert_close(y, whole_y[mine], msg=lambda text, case=case: f"{case}: {text}")
        (y * y.detach()).sum().backward()
        torch.testing.assert_close(given.grad, whole_x.grad[mine])
        for single, part in gradients(layer.experts).items():
            slot, kind = single.split(".", 1)
            exact = want[f"{groups.local_experts[int(slot)]}.{kind}"]
            dims = [d for d in range(part.dim()) if part.shape[d] != exact.shape[d]]
            assert len(dims) <= (groups.num_slices > 1)
            if dims:
                width = part.shape[dims[0]]
                exact = exact.narrow(dims[0], groups.slice_index * width, width)
            elif groups.num_slices > 1:  # copies, as of any replica
                torch.distributed.all_reduce(part, group=groups.replica_group)
            torch.testing.assert_close(part, exact, msg=f"{case} {single}")

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
