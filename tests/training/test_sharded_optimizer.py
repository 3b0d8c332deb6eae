"""A sharded optimizer of torch's own in a plain loop and in sets; torch.distributed.checkpoint:
test_distributed_state.py; fairseq: tests/integrations/fairseq/test_zero_sharding.py."""

import pytest
import torch
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world, share_out
from fairseq_tutel.moe import MoELayer

DIM = 4


def make(shard, seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(DIM, 40), nn.Linear(40, DIM), MoELayer(DIM, 2, hidden_dim=8, seed=seed)
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


def steps(model, wrapped, optimizers, first, last):
    rank, _ = process_world()
    for step in range(first, last):
        torch.manual_seed(10 * step + rank)
        wrapped(torch.randn(6, DIM)).square().sum().backward()
        training.clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _train(folder):
    rank, _ = process_world()
    plain = make(shard=False)
    steps(*plain, 0, 2)
    training.save_checkpoint(f"{folder}/plain.pt", plain[0], plain[2])
    want = steps(*plain, 2, 4)

    sharded = make(shard=True)
    steps(*sharded, 0, 2)
    training.save_checkpoint(f"{folder}/sharded.pt", sharded[0], sharded[2])
    assert_same_state(steps(*sharded, 2, 4), want)
    # the matrices of an expert, and one of two of linear layers; the gate's is with the first
    count = 2 + (2, 1)[rank]
    assert len(sharded[2][0].state) == count
    with pytest.raises(ValueError, match="before it has state"):
        training.shard_optimizer(plain[2][0])

    loaded = make(shard=True, seed=1)
    training.load_checkpoint(f"{folder}/plain.pt", loaded[0], loaded[2])
    assert len(loaded[2][0].state) == count
    assert_same_state(steps(*loaded, 2, 4), want)


def test_results_and_files_are_those_without_sharding(tmp_path):
    run_ranks(_train, 2, str(tmp_path))
    for part in ("shared", "rank-0", "rank-1"):
        states = [torch.load(tmp_path / f"{n}-{part}.pt") for n in ("plain", "sharded")]
        for key in ("model", "last_optimizer_state"):
            assert_same_state(*(state[key] for state in states))


def test_tensors_are_shared_out_evenly():
    assert share_out([3, 8, 3, 5, 1], 2) == [1, 0, 0, 1, 1]
    assert share_out([], 3) == [] and share_out([1, 1], 1) == [0, 0]
    sizes = [(7 * i) % 23 + 1 for i in range(100)]
    loads = [0] * 4
    for size, owner in zip(sizes, share_out(sizes, 4), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= 1
