"""A model without experts in the same loop: the results of torch's own means."""

import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import is_sharded, process_world
from fairseq_tutel.moe import MoELayer

DIM, ROWS, HALF, MAX_NORM = 4, 8, 3, 0.05


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def batch(step):
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(step))


def reference():
    """Weights after each half in one process, by torch alone."""
    model, optimizer = make()
    states = []
    for step in range(2 * HALF):
        x = batch(step)
        (model(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states[HALF - 1], states[-1]


def train(how, path, files="set", resume=False):
    """Half of the steps as every host makes them, saved afterwards; or the other half."""
    rank, world_size = process_world()
    model, optimizer = make()
    net = model
    if how == "shard_dense":
        net = training.shard_dense(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        assert all(is_sharded(param) for param in model.parameters()) == (world_size > 1)
    elif world_size > 1:
        net = training.wrap_data_parallel(model)
        training.shard_optimizer(optimizer)
    state = {"run": training.DistributedState(net, optimizer)}
    first = 0
    if resume:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        if files == "dcp":
            dcp.load(state, checkpoint_id=f"{path}.dcp")
            first = HALF
        else:
            first = training.load_checkpoint(path, net, optimizer)["step"]
    for step in range(first, first + HALF):
        x = batch(step).chunk(world_size)[rank]
        with training.collect_aux(net, combine="average") as aux:
            loss = (net(x) - x).square().mean()
        assert aux.loss == 0 and not (aux.layers or aux.load or aux.metrics_dict())
        assert aux.utilisation() == {}
        (loss + aux.loss).backward()
        assert training.clip_grad_norm_(net, MAX_NORM) > MAX_NORM
        optimizer.step()
        training.update_load_bias(net, [aux])
        optimizer.zero_grad()
    if not resume:
        training.save_checkpoint(path, net, optimizer, {"step": HALF})
        dcp.save(state, checkpoint_id=f"{path}.dcp")
    return training.full_state_dict(net)


def assert_near(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert rms_ratio(found[name], value) < 1e-5, name


def resume_each(path):
    return [train(how, path, files, True) for how in HOWS for files in ("set", "dcp")]


HOWS = ["wrap_data_parallel", "shard_dense"]


@pytest.mark.parametrize("saved_by", [1, 2])
def test_trains_saves_and_resumes_as_by_torch_alone(saved_by, tmp_path):
    half, end = reference()
    path = str(tmp_path / "run" / "last.pt")
    how = HOWS[saved_by - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        assert_near(run_ranks(train, saved_by, how, path)[0], half)
        assert sorted(os.listdir(tmp_path / "run")) == ["last.pt", "last.pt.dcp"]
        # a plain file, for torch's own means
        assert_near(torch.load(path, weights_only=True)["model"], half)
        for found in run_ranks(resume_each, 3 - saved_by, path)[0]:
            assert_near(found, end)


def test_a_dense_file_and_a_set_replace_each_other_and_are_told_apart(tmp_path):
    path = str(tmp_path / "last.pt")
    dense, sparse = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(MoELayer(2, 2))
    training.save_checkpoint(path, sparse)
    with pytest.raises(ValueError, match="last.pt has experts, and this model has no MoELayer"):
        training.load_checkpoint(path, dense)
    training.save_checkpoint(path, dense)
    assert os.listdir(tmp_path) == ["last.pt"]
    with pytest.raises(ValueError, match="last.pt is dense, .*2 experts.* upcycle"):
        training.load_checkpoint(path, sparse)
    training.save_checkpoint(path, sparse)
    assert sorted(os.listdir(tmp_path)) == ["last-rank-0.pt", "last-shared.pt"]
    training.load_checkpoint(path, sparse)
