"""State of experts in slices: files hold what one process with whole experts saves, bit for bit."""

import errno
import os
from unittest import mock

import pytest
import torch
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.checkpoint import CheckpointError, load_for_rank
from fairseq_tutel.distributed import (
    SliceGather,
    build_groups,
    process_world,
    take_slice,
    without_held_experts,
)
from fairseq_tutel.integrations.fairseq.trainer.parallel import share_scales
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training.adam16 import Adam16

DIM, HIDDEN, STEPS = 16, 128, 3
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "adam16": lambda params: Adam16(params, lr=0.02, betas=(0.9, 0.98), weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
CASES = [(2, "adamw"), (2, "adam16"), (1, "adam16"), (1, "momentum")]


class Model(nn.Module):
    def __init__(self, num_experts, placement, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(DIM, DIM)
        groups = build_groups(num_experts, placement=placement)
        self.moe = MoELayer(DIM, num_experts, HIDDEN, seed=seed, top_k=1, groups=groups)


def make(num_experts, optimizer, placement="replicated", seed=1, device="cpu"):
    model = Model(num_experts, placement, seed).to(device)
    training.prepare_data_parallel(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if isinstance(optimizer, Adam16):
        share_scales(optimizer, model.moe.groups)
    return model, optimizer


def draw(shape, seed, spread=0.0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(shape, generator=generator))
    return size * torch.randn(shape, generator=generator)


def train(model, optimizer):
    """A few steps, the weights of an expert with gradients of very different sizes."""
    experts = model.moe.experts
    whole = {"fc1.weight": (HIDDEN, DIM), "fc1.bias": (HIDDEN,), "fc2.weight": (DIM, HIDDEN),
             "fc2.bias": (DIM,)}  # fmt: skip
    for step in range(STEPS):
        for number, param in enumerate(model.inner.parameters()):
            param.grad = draw(param.shape, 100 * step + number)
        for number, (name, param) in enumerate(experts.named_parameters()):
            name = name.replace("_", ".")
            seeds = (1000 * step + 10 * expert + number for expert in experts.expert_ids)
            grads = (draw(whole[name], seed, 3.0) for seed in seeds)
            parts = [take_slice(grad, name, *experts.hidden_slice) for grad in grads]
            param.grad = torch.stack(parts)
        optimizer.step()


def content(path):
    """All experts' weights and all optimizer state of a set, flat."""
    state = load_for_rank(path, rank=0, world_size=1)
    found = {f"model {name}": value for name, value in state["model"].items()}
    for name, values in state["last_optimizer_state"]["named_state"].items():
        found |= {f"{key} {name}": value for key, value in values.items()}
    return found


def assert_same(path, reference):
    assert_same_state(content(path), content(reference), path)


def path_of(folder, case, how):
    return os.path.join(folder, f"{case[0]}-{case[1]}-{how}.pt")


def run_all(folder, cases, sources, refusals, device="cpu"):
    """Sets by case: what each placement saves after loading each source (the end of a set's name),
    and what sliced training from the start gives."""
    SliceGather.piece_bytes = 1000  # several pieces per tensor, the last one smaller
    rank, world_size = process_world()
    written = {}
    for case in cases:
        for placement in ("sliced", "replicated"):
            for source in sources:
                # all must come from the file
                model, optimizer = make(*case, placement, seed=7, device=device)
                training.load_checkpoint(path_of(folder, case, source), model, optimizer)
                path = path_of(folder, case, f"{world_size}-{placement}-from-{source}")
                training.save_checkpoint(path, model, optimizer)
                written.setdefault(case, []).append(path)
        model, optimizer = make(*case, "sliced")
        train(model, optimizer)
        path = path_of(folder, case, f"{world_size}-sliced")
        training.save_checkpoint(path, model, optimizer)
        written[case].append(path)
    if refusals:
        check_whole_state_and_refusals(folder)
    return written if rank == 0 else {}


def check_whole_state_and_refusals(folder):
    """Of two sliced experts on four ranks."""
    rank, _ = process_world()
    case = (2, "adam16")
    model, optimizer = make(*case, "sliced")
    slice_shape = model.moe.experts.fc2_weight.shape
    assert slice_shape == (1, DIM, HIDDEN // 2)
    (whole,) = shared = [training.full_state_dict(model)]
    assert bool(whole) == (rank == 0)
    torch.distributed.broadcast_object_list(shared)
    wanted = without_held_experts(Model(2, "replicated").moe.state_dict())  # of the same seed
    for name, value in wanted.items():
        name = name.replace("experts.0.", f"experts.{model.moe.groups.ep_rank}.")
        assert torch.equal(shared[0][f"moe.{name}"], value), name
    other = Model(2, "sliced", seed=5)
    training.load_full_state_dict(other, shared[0])
    assert_same_state(other.state_dict(), model.state_dict())

    both = nn.ModuleDict({"a": model, "b": Model(2, "replicated")})
    with pytest.raises(ValueError, match="one num_slices, but a.moe has 2 and b.moe has 1"):
        training.save_checkpoint(path_of(folder, case, "both"), both)

    train(model, optimizer)
    path = path_of(folder, case, "refused")
    training.save_checkpoint(path, model, optimizer)
    state, failed = optimizer.state[model.moe.experts.fc1_weight], "failed on 1 of 4 ranks: rank"
    no_memory = mock.Mock(side_effect=MemoryError("no memory"))
    no_disk = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space"))
    scale, mixed = 2 * state["exp_avg_scale"], state["exp_avg"].sum(-1)  # as adafactor's
    for ranks, change, message in (
        ([3], (SliceGather, "__init__", no_memory), f"{failed} 3: MemoryError: no memory"),
        ([3], (state, "exp_avg_scale", scale), r"ranks \[1, 3\] have slices .*, but differ in its"),
        (range(4), (state, "exp_avg", mixed), "exp_avg of .*experts.0.fc1.weight mixes the hidden "
         "units .*replicated"),
        ([1], (os, "fsync", no_disk), f"{failed} 1: OSError: .*no space"),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            if rank in ranks:
                (patch.setitem if change[0] is state else patch.setattr)(*change)
            with pytest.raises(CheckpointError, match=message):  # on every rank
                training.save_checkpoint(path, model, optimizer)
        assert_same(path, path_of(folder, case, "1"))  # the older set is still there
    training.save_checkpoint(path, model, optimizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With what one process trained, which all others must equal."""
    folder = str(tmp_path_factory.mktemp("sliced"))
    for case in CASES:
        model, optimizer = make(*case)
        train(model, optimizer)
        training.save_checkpoint(path_of(folder, case, "1"), model, optimizer)
    return folder


def test_sliced_and_replicated_write_the_same_bits_at_any_number_of_ranks(folder):
    """One process -> four ranks -> two -> one, each way between the placements."""
    written = run_ranks(run_all, 4, folder, CASES, ["1"], True, timeout=120)[0]
    sources = ["4-sliced", "4-replicated-from-1"]
    fewer = run_ranks(run_all, 2, folder, CASES, sources, False, timeout=120)[0]
    for case in CASES:
        assert len(written[case]) == 3 and len(fewer[case]) == 5
        model, optimizer = make(*case, seed=7)
        training.load_checkpoint(fewer[case][0], model, optimizer)
        again = path_of(folder, case, "1-again")
        training.save_checkpoint(again, model, optimizer)
        for path in (*written[case], *fewer[case], again):
            assert_same(path, path_of(folder, case, "1"))


@pytest.mark.gpu
def test_slices_on_a_gpu_are_joined_as_on_a_cpu(folder):
    written = run_ranks(run_all, 2, folder, CASES[2:], ["1"], False, "cuda", timeout=120)[0]
    for case in CASES[2:]:
        for path in written[case]:
            assert_same(path, path_of(folder, case, "1"))
