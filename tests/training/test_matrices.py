"""Muon on experts' matrices one by one, against Muon on parameters that are single matrices."""

import copy

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoELayer

DIM, EXPERTS, TOKENS, MAX_NORM = 8, 2, 16, 0.05
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"top_k": 1, "capacity_factor": 0.0}
        self.inner = nn.Linear(DIM, DIM)
        self.first = MoELayer(DIM, EXPERTS, 2 * DIM, seed=3, **options)
        gated = {"expert_network": "swiglu", "expert_options": {"bias": True}}
        self.second = MoELayer(DIM, EXPERTS, 12, seed=4, **gated, **options)

    def forward(self, x):
        return x + self.second(x + self.first(self.inner(x)))


def batch(step):
    rank, world_size = process_world()
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(step))
    return x.chunk(world_size)[rank]


def make():
    """Rates of 0: gradients add up in the optimizers, and no weight moves."""
    model = Model()
    net = training.wrap_data_parallel(model) if process_world()[1] > 1 else model
    matrices, others = training.matrix_parameters(net, leave_out="gate")
    optimizers = [torch.optim.Muon(matrices, lr=0.0), torch.optim.AdamW(others, lr=0.0)]
    return model, net, optimizers


def set_rates(optimizers):
    for optimizer, rate in zip(optimizers, (0.02, 0.01), strict=True):
        optimizer.param_groups[0]["lr"] = rate


def update(model, net, optimizers, step):
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(batch(step)).square().mean().backward()
    assert training.clip_grad_norm_(net, MAX_NORM) > MAX_NORM
    for optimizer in optimizers:
        optimizer.step()


def run(source, target, first, stop):
    """Train from the set of the updates before, save; return weights after a step that moves."""
    model, net, optimizers = make()
    if first:
        for param in model.parameters():
            param.data.zero_()
        assert training.load_checkpoint(source, net, optimizers) == {"step": first}
    for step in range(first, stop):
        update(model, net, optimizers, step)
    training.save_checkpoint(target, net, optimizers, {"step": stop})
    set_rates(optimizers)
    update(model, net, optimizers, stop)
    return training.full_state_dict(net)


def states(optimizers):
    return [[optimizer.state[param] for param in optimizer.param_groups[0]["params"]]
            for optimizer in optimizers]  # fmt: skip


def by_single_parameters(stop):
    """Do the same with each matrix as a parameter of Muon's own.

    Returns states after ``stop`` updates, and weights before and after the step that moves.
    """
    model = Model()
    singles, others = [], []  # (where it is in the model, a parameter by itself); what is no matrix
    for name, param in model.named_parameters():
        if "experts" in name and "weight" in name:
            singles += [((param, n), nn.Parameter(param[n].clone())) for n in range(len(param))]
        elif param.dim() == 2 and "experts" not in name and "gate" not in name:
            singles.append(((param, slice(None)), nn.Parameter(param.clone())))
        else:
            others.append(param)
    # a linear layer's; four tensors in one network, six in the other, by experts
    assert [len(others), len(singles)] == [1 + 2 * (1 + 2), 1 + EXPERTS * (2 + 3)]
    optimizers = [
        torch.optim.Muon([single for _, single in singles], lr=0.0),
        torch.optim.AdamW(others, lr=0.0),
    ]
    before = copy.deepcopy(model.state_dict())
    for step in range(stop + 1):
        if step == stop:
            given = copy.deepcopy(states(optimizers))
            set_rates(optimizers)
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for (param, index), single in singles:
            single.grad = param.grad[index].clone()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        for (param, index), single in singles:
            param[index] = single
    return given, before, model.state_dict()


def assert_same_run(path, weights, want):
    """Optimizers were given the same gradients; the step is the same to Muon's rounding (bf16)."""
    want_states, before, after = want
    model, net, optimizers = make()
    training.load_checkpoint(path, net, optimizers)
    for got_states, wanted in zip(states(optimizers), want_states, strict=True):
        for got, state in zip(got_states, wanted, strict=True):
            assert got.keys() == state.keys()
            for key, value in state.items():
                assert rms_ratio(got[key], value) < 1e-5, key
    assert weights.keys() == after.keys()
    for name, value in after.items():
        moved = rms_ratio(weights[name] - before[name], value - before[name])
        assert moved < 0.05, name


def test_each_matrix_is_stepped_by_itself_also_after_a_change_of_ranks(tmp_path):
    alone, two, changed = (str(tmp_path / f"{name}.pt") for name in ("alone", "two", "changed"))
    want = by_single_parameters(4)
    assert_same_run(alone, run("", alone, 0, 4), want)
    run_ranks(run, 2, "", two, 0, 2)
    for ranks in (1, 4):
        weights = run_ranks(run, ranks, two, changed, 2, 4)[0]
        assert_same_run(changed, weights, want)
