"""Copies of a model with experts on two ranks compute and train as those of one process."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from helpers.assertions import assert_tensors_close
from helpers.distributed import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import ExchangeConfig, MoELayer

M, STEPS = 8, 3

# what holds process groups in a layer
LAYERS = {
    "overlapped": lambda own: (4, {"exchange": ExchangeConfig("2dh", overlap_degree=2)}),
    "gathered": lambda own: (4, {"exchange": ExchangeConfig(r=0)}),
    "sliced": lambda own: (1, {"groups": build_groups(1, placement="sliced")}),
    "replicated": lambda own: (1, {}),
    "own": lambda own: (4, {"expert_fn": lambda: nn.Linear(M, M)}),
    # own experts that share a layer
    "tied": lambda own: (4, {"expert_fn": lambda: nn.Sequential(nn.Linear(M, M), own),
                             "groups": build_groups(4, expert_parallel_size=1)}),
}  # fmt: skip


def build(kind):
    torch.manual_seed(0)
    experts, options = LAYERS[kind](nn.Linear(M, M))
    layer = MoELayer(M, experts, top_k=1, capacity_factor=0.0, seed=1, **options)
    block: Any = nn.Sequential(nn.Linear(M, M), layer)
    return nn.TransformerEncoder(block, 2).layers


def train(blocks, ema=None):
    rank, world_size = process_world()
    model = nn.Sequential(*blocks)
    net = training.wrap_data_parallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(STEPS):
        x = torch.randn(8, M, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        optimizer.zero_grad()
        (net(x) - x.roll(1, -1)).square().mean().backward()
        training.clip_grad_norm_(net, 0.5)
        optimizer.step()
        if ema is not None:
            ema.update_parameters(blocks)


def states():
    """By layer, whole models: trained, its average, and a copy of the average, trained on."""
    found = {}
    for kind in LAYERS:
        blocks = build(kind)
        ema = AveragedModel(blocks, avg_fn=get_ema_avg_fn(0.5))
        train(blocks, ema)
        again = copy.deepcopy(ema.module)
        train(again)
        models = {"trained": blocks, "average": ema.module, "again": again}
        found |= {(kind, name): training.full_state_dict(each) for name, each in models.items()}
        if process_world()[1] > 1:
            for write in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
                with pytest.raises(ValueError, match="2 ranks cannot be .*use .*save_checkpoint"):
                    write(again)
    return found


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_averages_and_training_of_copies_are_those_of_one_process():
    want, (got, _) = states(), run_ranks(states, 2)
    for case, state in want.items():
        assert_tensors_close(got[case], state, 1e-5)
        assert case[1] == "trained" or any(
            not torch.equal(value, want[case[0], "trained"][name]) for name, value in state.items()
        )
    layer = MoELayer(M, 4)
    x = torch.randn(5, M)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
