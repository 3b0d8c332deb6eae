"""Sets that commit 381b71b wrote load, resume and reshard.

``data_381b71b`` was made by ``run_ranks(write, 2, folder, kind)`` of this file at that commit,
where ``training`` was ``hosts``. ``expected.json`` has what ``write`` returned for each kind:
checksums of the weights, and the losses of the steps after.
"""

import hashlib
import json
import pathlib

import pytest
import torch
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.checkpoint import inspect, merge, reshard
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training.adam16 import Adam16

DATA = pathlib.Path(__file__).parent / "data_381b71b"
DIM, SEQUENCES, SAVED_AT, STEPS = 4, 8, 2, 5
EXPERTS = {"replicated": 4, "sliced": 1}


def make(kind):
    """A model, itself wrapped where there are several ranks, and its optimizer."""
    torch.manual_seed(1)
    experts = EXPERTS[kind]
    groups = build_groups(experts, placement=kind) if process_world()[1] > 1 else None
    options = {"top_k": min(2, experts), "capacity_factor": 0.0, "groups": groups, "seed": 2}
    moe = MoELayer(DIM, experts, 8, **options)
    model = nn.Sequential(nn.Linear(DIM, DIM), moe)
    net = training.wrap_data_parallel(model) if process_world()[1] > 1 else model
    optimizer = Adam16 if kind == "replicated" else torch.optim.AdamW
    return model, net, optimizer(model.parameters(), lr=0.05)


def step(net, optimizer, number):
    """Mean loss over the ranks' equal parts of a batch."""
    rank, world_size = process_world()
    x = torch.randn(SEQUENCES, 3, DIM, generator=torch.Generator().manual_seed(number))
    mine = x.chunk(world_size)[rank]
    loss = (net(mine) - mine.roll(1, -1)).square().mean()
    loss.backward()
    training.clip_grad_norm_(net, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def checksums(model):
    full = training.full_state_dict(model)
    return {n: hashlib.sha256(v.numpy().tobytes()).hexdigest()[:16] for n, v in full.items()}


def write(folder, kind):
    model, net, optimizer = make(kind)
    for number in range(SAVED_AT):
        step(net, optimizer, number)
    path = f"{folder}/{kind}.pt"
    training.save_checkpoint(path, model, optimizer, {"step": SAVED_AT})
    sums = checksums(model)
    return sums, [step(net, optimizer, number) for number in range(SAVED_AT, STEPS)]


def resume(path, kind):
    model, net, optimizer = make(kind)
    first = training.load_checkpoint(path, model, optimizer)["step"]
    sums = checksums(model)
    return sums, [step(net, optimizer, number) for number in range(first, STEPS)]


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_resumes(kind, ranks):
    check(run_ranks(resume, ranks, str(DATA / f"{kind}.pt"), kind), kind)


@pytest.mark.parametrize("kind", EXPERTS)
def test_reshards_and_merges(kind, tmp_path):
    source = str(DATA / f"{kind}.pt")
    assert inspect(source, verify=True)["consistent"]
    merged = merge(source, str(tmp_path / "one.pt"), with_optimizer=True)
    for rewritten in (reshard(source, str(tmp_path / "wide.pt"), 4), merged):
        check([resume(rewritten, kind)], kind)


def check(results, kind):
    expected = json.loads((DATA / "expected.json").read_text())[kind]
    assert results[0][0] == expected["sha256"]
    means = [sum(each) / len(results) for each in zip(*(r[1] for r in results), strict=True)]
    assert means == pytest.approx(expected["losses"], rel=1e-5)
