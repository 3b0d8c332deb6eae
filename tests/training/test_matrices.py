"""Muon on experts' matrices one by one, against Muon on parameters that are single matrices."""

import pytest
import torch
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoELayer

DIM, EXPERTS, TOKENS, MAX_NORM = 8, 2, 16, 0.05
LEFT_OUT = r"gate"
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
    """This rank's tokens of a step."""
    rank, world_size = process_world()
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(step))
    return x.chunk(world_size)[rank]


def make():
    model = Model()
    if process_world()[1] > 1:
        training.prepare_data_parallel(model)
        net = nn.parallel.DistributedDataParallel(model)
    else:
        net = model
    matrices, others = training.matrix_parameters(net, leave_out=LEFT_OUT)
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    return model, net, optimizers


def update(model, net, optimizers, step):
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(batch(step)).square().mean().backward()
    assert training.clip_grad_norm_(net, MAX_NORM) > MAX_NORM
    for optimizer in optimizers:
        optimizer.step()


def run(path, first, stop):
    """All weights after updates up to ``stop``, from the set of the updates before."""
    model, net, optimizers = make()
    if first:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert training.load_checkpoint(path, net, optimizers) == {"step": first}
    for step in range(first, stop):
        update(model, net, optimizers, step)
    if not first:
        training.save_checkpoint(path, net, optimizers, {"step": stop})
    return training.full_state_dict(net)


def by_single_parameters(stop):
    """The same, where each matrix is a parameter of Muon's own."""
    model = Model()
    singles, adam = [], []  # (where it is in the model, a parameter by itself); what is no matrix
    for name, param in model.named_parameters():
        if "experts" in name and "weight" in name:
            singles += [((param, n), nn.Parameter(param[n].clone())) for n in range(len(param))]
        elif param.dim() == 2 and "experts" not in name and "gate" not in name:
            singles.append(((param, slice(None)), nn.Parameter(param.clone())))
        else:
            adam.append(param)
    # a linear layer's; four tensors in one network, six in the other, by experts
    assert [len(adam), len(singles)] == [1 + 2 * (1 + 2), 1 + EXPERTS * (2 + 3)]
    muon = torch.optim.Muon([single for _, single in singles], lr=0.02)
    adam = torch.optim.AdamW(adam, lr=0.01)
    for step in range(stop):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for (param, index), single in singles:
            single.grad = param.grad[index].clone()
        muon.step()
        adam.step()
        with torch.no_grad():
            for (param, index), single in singles:
                param[index] = single
    return model.state_dict()


def test_each_matrix_is_stepped_by_itself_also_after_a_change_of_ranks(tmp_path):
    path = str(tmp_path / "set.pt")
    want = by_single_parameters(4)
    assert_same_state(run(str(tmp_path / "alone.pt"), 0, 4), want)
    run_ranks(run, 2, path, 0, 2)
    for ranks in (1, 4):
        state = run_ranks(run, ranks, path, 2, 4)[0]
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], atol=2e-6, rtol=1e-5, msg=name)


def test_refusals(tmp_path):
    model, _, (muon, adam) = make()
    with pytest.raises(ValueError, match="two optimizers hold .*experts.0.fc1.weight"):
        training.save_checkpoint(str(tmp_path / "x.pt"), model, [muon, muon])
    training.save_checkpoint(str(tmp_path / "x.pt"), model, [muon, adam])
    with pytest.raises(ValueError, match="has 2 parameter groups, this one has 1"):
        training.load_checkpoint(str(tmp_path / "x.pt"), model, adam)
    model.double()
    with pytest.raises(ValueError, match="moved or converted after matrix_parameters"):
        muon.step()
    sliced = nn.Sequential(MoELayer(DIM, EXPERTS, 2 * DIM))
    sliced[0].experts.hidden_slice = (0, 2)
    with pytest.raises(ValueError, match="0.experts: each rank holds a slice.*replicated"):
        training.matrix_parameters(sliced)
