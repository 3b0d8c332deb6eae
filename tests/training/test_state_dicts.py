"""State dicts by the means of torch and other libraries: whose experts they hold."""

import copy
import os
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from helpers.sets import member
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer

DIM, EXPERTS = 4, 4
PARTS = "experts 0..1 of 4", "experts 2..3 of 4"  # of two ranks


def build(placement="replicated", experts=EXPERTS, own=False, **options):
    torch.manual_seed(0)
    groups = build_groups(experts, placement=placement)
    if own:
        torch.manual_seed(process_world()[0])
        options["experts"] = [nn.Linear(DIM, DIM) for _ in groups.local_experts]
    options = {"top_k": 1, "groups": groups, **options}
    return nn.Sequential(nn.Linear(DIM, DIM), MoELayer(DIM, experts, None if own else 8, **options))


def check_ranks(folder):
    rank, world_size = process_world()
    for number, model in enumerate((build(seed=1), build(own=True), build("sliced", 1, seed=1))):
        mine = copy.deepcopy(model.state_dict())
        assert mine.keys() >= {"0.weight", "1.gate.wg.weight", "1.experts_held"}
        path = os.path.join(folder, f"{number}-{rank}.pt")
        torch.save(mine, path)
        torch.distributed.barrier()
        other = torch.load(os.path.join(folder, f"{number}-{1 - rank}.pt"), weights_only=True)
        assert type(other["1.experts_held"]) is torch.Tensor
        before = {name: value for name, value in mine.items() if name.startswith("1.")}
        with pytest.raises(ValueError, match="full_state_dict") as error:
            model.load_state_dict(other)
        slices = [f"slice {index} of 2 of experts 0..0 of 1" for index in range(2)]
        theirs, own = (slices if number == 2 else PARTS)[:: 1 if rank else -1]
        wanted = f"1.experts_held: the state dict has {theirs}, but this rank holds {own}:"
        assert wanted in str(error.value)
        after = model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        model.load_state_dict(torch.load(path, weights_only=True))  # its own
        del other["1.experts_held"]
        model.load_state_dict(other)  # saved before there was the mark
        model.load_state_dict(mine)
        with pytest.raises(dcp.CheckpointException, match="full_state_dict"):
            dcp.save(get_model_state_dict(model), checkpoint_id=os.path.join(folder, f"{number}"))

    adapters_of_ranks()
    model = build(seed=1)
    full = training.full_state_dict(model)
    assert not any("held" in name for name in full)
    if rank == 0:  # every rank would take the first ones, and nobody would see it
        more = r"more experts than the experts 0\.\.1 of 4 .*load_full"
        with pytest.raises(ValueError, match=more):
            model.load_state_dict(full, strict=False)
    training.save_checkpoint(os.path.join(folder, "set.pt"), model)
    for part in ("shared", "rank-0", "rank-1"):
        saved = torch.load(member(os.path.join(folder, "set.pt"), part), weights_only=False)
        assert not any("held" in name for name in saved["model"]), part
    if rank == 0:
        torch.save(full, os.path.join(folder, "full.pt"))


def adapters_of_ranks():
    """A part of each expert's tensors, as peft saves and loads it."""
    model, other = build(own=True), build(own=True)
    for own in model[1].experts:
        nn.init.normal_(own.bias)

    def biases(state):
        return {name: t for name, t in state.items() if re.search("experts.*bias", name)}

    adapters = biases(model.state_dict())
    with pytest.raises(ValueError, match="a part of the experts' .*load_full_state_dict.*strict=F"):
        other.load_state_dict(adapters, strict=False)
    state = [training.full_state_dict(model)]
    torch.distributed.broadcast_object_list(state)
    adapters = biases(state[0])
    assert len(adapters) == EXPERTS
    for own in other[1].experts:
        nn.init.zeros_(own.bias)
    with pytest.raises(ValueError, match="the state dict lacks 0.weight"):
        training.load_full_state_dict(other, adapters)
    training.load_full_state_dict(other, adapters, strict=False)
    assert_same_state(other.state_dict(), model.state_dict())


def test_state_dicts_of_ranks_say_whose_experts_they_hold(tmp_path):
    """Loaded into another rank they replaced its experts without a word."""
    run_ranks(check_ranks, 2, str(tmp_path))
    full = torch.load(tmp_path / "full.pt")
    assert len(full) == 2 + 1 + 4 * EXPERTS
    model = build(seed=2)
    assert model.state_dict().keys() == full.keys()  # one process has all: no mark
    model.load_state_dict(full)
    with pytest.raises(ValueError, match=r"experts 2\.\.3 of 4.* holds experts 0\.\.3 of 4"):
        model.load_state_dict(torch.load(tmp_path / "0-1.pt"))


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.parametrize("options", [{}, {"own": True}], ids=["built-in", "own"])
def test_torch_finds_every_name(options, tmp_path):
    model, other = build(seed=1, **options), build(seed=2, **options)
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(other, state)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "dcp")
    third = build(seed=3, **options)
    state = get_model_state_dict(third)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(third, state)
    x = torch.randn(5, DIM)
    assert torch.equal(model(x), other(x)) and torch.equal(model(x), third(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_entries_are_tensors_of_their_own(dtype):
    """safetensors saves no tensor that is a part of another's storage; memory is still one."""
    model = build(seed=1).to(dtype)
    state = model.state_dict()
    for name, value in state.items():
        assert value.untyped_storage().data_ptr() == value.data_ptr(), name
        assert value.untyped_storage().nbytes() == value.nbytes, name
    state["1.experts.2.fc1.bias"].fill_(7)
    assert (model[1].experts.fc1_bias[2] == 7).all() and model[1].experts.fc1_bias[1].max() < 7
    del model
    assert (state["1.experts.2.fc1.bias"] == 7).all()  # and lives as long as is needed
    with_grad = build(seed=1).state_dict(keep_vars=True)
    assert with_grad["1.experts.2.fc1.bias"].requires_grad


@pytest.mark.extras
def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = build(seed=1), build(seed=2)
    safetensors.save_model(model, str(tmp_path / "x.safetensors"))
    assert safetensors.load_model(other, str(tmp_path / "x.safetensors")) == (set(), [])
    x = torch.randn(5, DIM)
    assert torch.equal(model(x), other(x))
    run_ranks(safetensors_on_ranks, 2, str(tmp_path / "ranks.safetensors"))


def safetensors_on_ranks(path):
    """One file of all experts, by way of the full state; none of one rank's alone."""
    import safetensors.torch

    rank, _ = process_world()
    model, other = build(seed=1), build(seed=2)
    for save in (safetensors.torch.save_model, lambda m, p: safetensors.torch.save(m.state_dict())):
        with pytest.raises(ValueError, match=r"only experts \d\.\.\d of 4.*full_state_dict"):
            save(model, path)
    full = training.full_state_dict(model)
    if rank == 0:
        safetensors.torch.save_file(full, path)
    torch.distributed.barrier()
    training.load_full_state_dict(other, safetensors.torch.load_file(path))
    assert_same_state(other.state_dict(), model.state_dict())
