"""A sharded optimizer of torch's own in a plain loop. Files: test_toy_host.py and
test_distributed_state.py; fairseq: tests/integrations/fairseq/test_zero_sharding.py."""

import pytest
import torch
from helpers.assertions import assert_same_state
from helpers.distributed import on_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world, share_out
from fairseq_tutel.moe import MoELayer

DIM = 4


def make(shard):
    torch.manual_seed(0)
    layers = nn.Linear(DIM, 40), nn.Linear(40, DIM), MoELayer(DIM, 2, hidden_dim=8, seed=0)
    model = nn.Sequential(*layers)
    wrapped = training.wrap_data_parallel(model) if process_world()[1] > 1 else model
    matrices, others = training.matrix_parameters(model)
    optimizers = [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
        torch.optim.AdamW(others, lr=0.02),
    ]
    for optimizer in optimizers if shard else ():
        training.shard_optimizer(optimizer)
        training.shard_optimizer(optimizer)  # once more changes nothing
    return model, wrapped, optimizers


def steps(model, wrapped, optimizers):
    rank, _ = process_world()
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        wrapped(torch.randn(6, DIM)).square().sum().backward()
        training.clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@on_ranks(2)
def test_results_are_those_without_sharding():
    rank, _ = process_world()
    plain, sharded = make(shard=False), make(shard=True)
    assert_same_state(*(steps(*each) for each in (sharded, plain)))
    # the matrices of an expert, and one of two of linear layers; the gate's is with the first
    assert len(sharded[2][0].state) == 2 + (2, 1)[rank]
    with pytest.raises(ValueError, match="before it has state"):
        training.shard_optimizer(plain[2][0])


def test_tensors_are_shared_out_evenly():
    assert share_out([3, 8, 3, 5, 1], 2) == [1, 0, 0, 1, 1]
    assert share_out([], 3) == [] and share_out([1, 1], 1) == [0, 0]
    sizes = [(7 * i) % 23 + 1 for i in range(100)]
    loads = [0] * 4
    for size, owner in zip(sizes, share_out(sizes, 4), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= 1
