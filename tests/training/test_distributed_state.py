"""torch.distributed.checkpoint with experts, on other numbers of ranks, beside our own sets."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer

DIM, EXPERTS = 4, 2


class Model(nn.Module):
    """Built-in experts, in slices if there are more ranks; or experts of one's own."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(DIM, DIM)
        groups = build_groups(EXPERTS, placement="sliced" if kind == "sliced" else "replicated")
        options = {"top_k": 1, "capacity_factor": 0.0, "groups": groups}
        if kind == "own":
            options["expert_fn"] = lambda: nn.Linear(DIM, DIM)
        else:
            options["hidden_dim"] = 8
        self.moe = MoELayer(DIM, EXPERTS, seed=3, **options)
        self.inner.bias.requires_grad_(False)

    def forward(self, x):
        return x + self.moe(self.inner(x))


def make(kind, wrap="prepare", blank=False):
    """A model, and an optimizer without state."""
    model = Model(kind)
    if wrap == "fsdp":
        from torch.distributed.fsdp import fully_shard

        training.prepare_data_parallel(model)
        mesh = init_device_mesh("cpu", (process_world()[1],))
        fully_shard(model, mesh=mesh, ignored_params=set(training.expert_parameters(model)))
    elif process_world()[1] > 1:
        training.prepare_data_parallel(model)
    if blank:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if kind == "stacked" and process_world()[1] == 2:
        training.shard_optimizer(optimizer)
    return model, optimizer


def save(folder, kind, wrap):
    """Two steps, then both kinds of files."""
    model, optimizer = make(kind, wrap)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(6, DIM)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    training.save_checkpoint(f"{folder}/{kind}/set.pt", model, optimizer)
    saving = dcp.async_save(
        {"run": training.DistributedState(model, optimizer)}, checkpoint_id=f"{folder}/{kind}/dcp"
    )
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # it goes on while files are written
    saving.result()


def load(folder, kind, files=None):
    """Both kinds of files, into models on these ranks: the same weights and optimizer states."""
    files = f"{folder}/{files or kind}"
    model, optimizer = make(kind, blank=True)
    state = {"run": training.DistributedState(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{files}/dcp")
    wanted, theirs = make(kind, blank=True)
    training.load_checkpoint(f"{files}/set.pt", wanted, theirs)
    assert_same_state(model.state_dict(), wanted.state_dict())
    mine, theirs = optimizer.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for number, entries in theirs["state"].items():
        assert_same_state(mine["state"][number], entries)
        assert entries["step"] == 2 and entries["exp_avg"].abs().max() > 0
    held = len(mine["state"])
    if kind == "stacked" and process_world()[1] == 2:
        assert held < len(list(model.parameters())) - 1  # a part of the dense ones
    else:
        assert held == len(list(model.parameters())) - 1
    assert mine["state"].keys() == theirs["state"].keys()
    return training.full_state_dict(model)


def save_each(folder):
    save(folder, "own", "fsdp")
    save(folder, "stacked", "prepare")


def load_each(folder, kinds):
    return {kind: load(folder, kind) for kind in kinds}


def check_four(folder):
    found = load_each(folder, ("own", "stacked"))
    found["stacked, in slices"] = load(folder, "sliced", files="stacked")
    save(folder, "sliced", "prepare")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of two ranks, and of slices on four, which have loaded those of two."""
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(save_each, 2, str(folder))
    return folder, run_ranks(check_four, 4, str(folder))[0]


def test_other_numbers_of_ranks_read_what_sets_hold(folder):
    path, on_four = folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        alone = load_each(path, ("own", "stacked", "sliced"))
        for kind in ("own", "stacked"):
            assert_same_state(on_four[kind], alone[kind])
        assert_same_state(on_four["stacked, in slices"], alone["stacked"])
        on_two = run_ranks(load_each, 2, str(path), ("sliced", "stacked"))[0]
        assert all(assert_same_state(on_two[kind], alone[kind]) is None for kind in on_two)

        # whose names are those of one process, for torch's own means
        plain = Model("sliced").state_dict()
        dcp.load({"run": {"model": plain}}, checkpoint_id=path / "sliced" / "dcp")
        assert_same_state(plain, alone["sliced"])
        dcp_to_torch_save(path / "sliced" / "dcp", path / "one.pt")
        assert_same_state(torch.load(path / "one.pt")["run"]["model"], alone["sliced"])
