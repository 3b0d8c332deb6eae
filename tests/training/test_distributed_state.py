"""torch.distributed.checkpoint with experts, on other numbers of ranks, beside our own sets."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.assertions import assert_same_state, assert_tensors_close
from helpers.distributed import run_ranks
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training.adam16 import Adam16

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")

DIM, EXPERTS = 4, 2
NEAR = 1e-4  # a step more or less changes AdamW's weights by 0.026


class Model(nn.Module):
    def __init__(self, placement="replicated"):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(DIM, DIM)
        groups = build_groups(EXPERTS, placement=placement)
        options = {"top_k": 1, "capacity_factor": 0.0, "groups": groups}
        self.moe = MoELayer(DIM, EXPERTS, 8, seed=3, **options)
        self.inner.bias.requires_grad_(False)

    def forward(self, x):
        return x + self.moe(self.inner(x))


def make(placement="replicated"):
    model = Model(placement)
    if process_world()[1] > 1:
        training.prepare_data_parallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


@torch.no_grad()
def clear(model):
    for param in model.parameters():
        param.zero_()


def save(folder):
    """Two steps of sliced experts, then both kinds of files."""
    model, optimizer = make("sliced")
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(6, DIM)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    training.save_checkpoint(f"{folder}/set.pt", model, optimizer)
    saving = dcp.async_save(
        {"run": training.DistributedState(model, optimizer)}, checkpoint_id=f"{folder}/dcp"
    )
    clear(model)  # it goes on while files are written
    saving.result()


def load(folder):
    """Both kinds of files, into models on these ranks: the same weights and optimizer states."""
    (model, optimizer), (wanted, theirs) = make("sliced"), make("sliced")
    clear(model)
    dcp.load({"run": training.DistributedState(model, optimizer)}, checkpoint_id=f"{folder}/dcp")
    training.load_checkpoint(f"{folder}/set.pt", wanted, theirs)
    assert_same_state(model.state_dict(), wanted.state_dict())
    assert_same_state(optimizer.state_dict(), theirs.state_dict())
    states = theirs.state_dict()["state"].values()
    assert len(states) == len(list(model.parameters())) - 1  # all but the frozen one
    assert all(each["step"] == 2 and each["exp_avg"].any() for each in states)
    return training.full_state_dict(model)


def save_and_load(folder):
    save(folder)
    return load(folder)


def test_any_number_of_ranks_reads_what_sets_hold(tmp_path):
    """Slices and whole ones. Sharded models and optimizers: test_toy_host.py."""
    in_slices = run_ranks(save_and_load, 4, str(tmp_path))[0]
    alone = load(tmp_path)
    for state in (in_slices, run_ranks(load, 2, str(tmp_path))[0]):
        assert_same_state(state, alone)
    # whose names are those of one process, for torch's own means
    plain = Model("sliced").state_dict()
    dcp.load({"run": {"model": plain}}, checkpoint_id=tmp_path / "dcp")
    assert_same_state(plain, alone)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "one.pt")
    assert_same_state(torch.load(tmp_path / "one.pt")["run"]["model"], alone)


def muon(model):
    matrices, others = training.matrix_parameters(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def one(make, **options):
    return lambda model: [make(model.parameters(), lr=0.02, **options)]


OPTIMIZERS = {
    "AdamW": one(torch.optim.AdamW),
    "Adam16": one(Adam16),
    "Muon": muon,
    "NAdam": one(torch.optim.NAdam),
    "Rprop": one(torch.optim.Rprop),
    "SGD": one(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "SGD without state": one(torch.optim.SGD),
}


def three_steps(model, optimizers):
    for step in range(3):
        x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return training.full_state_dict(model)


def entries(state):
    """(parameter, entry) of all optimizer state."""
    named = state.state_dict()["last_optimizer_state"]["named_state"]
    return {(name, key) for name, values in named.items() for key in values}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_before_the_first_step_makes_none(kind, tmp_path):
    """Training goes on as without it, from the live optimizer and from a stepped one that loads."""
    if kind == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch 2.9")
    model = Model()
    wanted = three_steps(model, OPTIMIZERS[kind](model))
    model = Model()
    optimizers = OPTIMIZERS[kind](model)
    for optimizer in optimizers:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # counts steps
        optimizer.register_step_post_hook(lambda *_: pytest.fail("a step"))
    state = training.DistributedState(model, optimizers)
    dcp.save({"run": state}, checkpoint_id=tmp_path)
    for optimizer in optimizers:
        assert not optimizer.state and not getattr(optimizer, "_opt_called", False)
        optimizer._optimizer_step_post_hooks.clear()
    saved = entries(state)
    assert_tensors_close(three_steps(model, optimizers), wanted, NEAR)
    assert entries(state) == saved

    dcp.load({"run": state}, checkpoint_id=tmp_path)
    assert not any(optimizer.state for optimizer in optimizers)
    assert_tensors_close(three_steps(model, optimizers), wanted, NEAR)


def save_first(folder):
    """Three steps from what a sharded optimizer saved before its first step, and without."""
    model, optimizer = make()
    training.shard_optimizer(optimizer)
    state = {"run": training.DistributedState(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/first")
    assert not optimizer.state
    wanted = three_steps(model, [optimizer])
    dcp.load(state, checkpoint_id=f"{folder}/first")
    assert not optimizer.state
    assert_tensors_close(three_steps(model, [optimizer]), wanted, NEAR)
    model, optimizer = make()
    assert_tensors_close(three_steps(model, [optimizer]), wanted, NEAR)


def test_ranks_with_a_sharded_optimizer_save_before_the_first_step(tmp_path):
    run_ranks(save_first, 2, str(tmp_path))
