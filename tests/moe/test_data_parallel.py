"""A PyTorch model with an MoE layer under DistributedDataParallel equals it on one rank."""

import pytest
import torch
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel.distributed import ExpertParallelGroups, process_world
from fairseq_tutel.moe import MoELayer, wrap_data_parallel

DIM, PER_RANK, STEPS = 8, 6, 3


class Model(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.moe = MoELayer(DIM, num_experts, 2 * DIM, capacity_factor=0.0, seed=3)

    def forward(self, x):
        # without the aux loss, which is not linear in the tokens of a rank
        return x + self.moe(self.inner(x))


def train(num_experts, ranks):
    """State after some steps of SGD on the mean loss, with experts by their global index."""
    rank, world_size = process_world()
    torch.manual_seed(0)
    model = Model(num_experts)
    groups = model.moe.groups
    net = wrap_data_parallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(ranks * PER_RANK, DIM, generator=torch.Generator().manual_seed(step))
        mine = x if world_size == 1 else x[rank * PER_RANK : (rank + 1) * PER_RANK]
        optimizer.zero_grad()
        net(mine).square().mean().backward()
        optimizer.step()
    state = {}
    for name, value in model.state_dict().items():
        head, _, tail = name.partition("experts.")
        if tail:
            slot, _, rest = tail.partition(".")
            name = f"{head}experts.{groups.local_experts[int(slot)]}.{rest}"
        state[name] = value
    return state


@pytest.mark.parametrize(("num_experts", "ranks"), [(4, 2), (2, 2), (2, 4)])
def test_equals_one_rank(num_experts, ranks):
    (expected,) = run_ranks(train, 1, num_experts, ranks)
    states = run_ranks(train, ranks, num_experts, ranks)
    seen = set()
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)
        seen |= set(state)
    assert seen == set(expected)


def freeze_some():
    """One step with half of the experts' parameters frozen: they stay, the others learn."""
    torch.manual_seed(0)
    model = Model(2)
    experts = model.moe.experts
    experts.fc1_weight.requires_grad_(False)
    experts.fc1_bias.requires_grad_(False)
    net = wrap_data_parallel(model)
    net(torch.randn(PER_RANK, DIM)).square().mean().backward()
    return {name: param.grad is not None for name, param in experts.named_parameters()}


def test_frozen_experts():
    for has_grad in run_ranks(freeze_some, 2):
        assert has_grad == {
            "fc1_weight": False, "fc1_bias": False, "fc2_weight": True, "fc2_bias": True
        }  # fmt: skip


def wrap_wrongly():
    """Plain DistributedDataParallel, and a layer that was built for other ranks."""
    net = nn.parallel.DistributedDataParallel(Model(2))
    with pytest.raises(ValueError, match="moe.experts.*wrap_data_parallel"):
        net(torch.randn(PER_RANK, DIM))
    net = wrap_data_parallel(Model(2))
    net(torch.randn(PER_RANK, DIM)).sum().backward()
    model = Model(2)
    model.moe.groups = ExpertParallelGroups(2)  # as if built before init_process_group
    with pytest.raises(ValueError, match="built for 1 ranks, and there are 2: build the model aft"):
        wrap_data_parallel(model)


def test_wrong_wrapping_is_refused():
    run_ranks(wrap_wrongly, 2)
