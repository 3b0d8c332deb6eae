"""Models sharded but for their experts train as one process does, and save whole tensors."""

import functools

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.distributed import is_sharded, process_world
from fairseq_tutel.moe import MoELayer

DIM, ROWS, STEPS = 8, 8, 5


class Block(nn.Module):
    def __init__(self, experts, seed):
        super().__init__()
        self.inner, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.moe = MoELayer(DIM, experts, hidden_dim=12, top_k=2, capacity_factor=0.0, seed=seed)

    def forward(self, x):
        return x + self.moe(self.inner(self.norm(x)))


class Model(nn.Module):
    def __init__(self, experts, recompute=False):
        super().__init__()
        # dense weights of their own on every rank: rank 0's count
        torch.manual_seed(process_world()[0])
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 3, bias=False)
        self.layers = nn.ModuleList(Block(experts, seed) for seed in (1, 2))
        self.recompute = recompute

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.last(x)


def batch(step, part):
    """This rank's rows of half of a step's batch."""
    rank, world_size = process_world()
    generator = torch.Generator().manual_seed(2 * step + part)
    return torch.randn(ROWS, DIM, generator=generator).chunk(world_size)[rank]


def step_of(model, optimizer, step):
    """Two accumulated passes, clipped; the norm before."""
    for part in (0, 1):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(part == 1)
        model(batch(step, part)).float().square().mean().mul(0.5).backward()
    norm = training.clip_grad_norm_(model, 0.2)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def make(experts, recompute=False, **options):
    model = training.shard_dense(Model(experts, recompute), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(experts, recompute=False, half=False, path=None):
    """(norms, whole state on rank 0)"""
    options = {}
    if half:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        half_sums = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": half_sums}
    model, optimizer = make(experts, recompute, **options)
    norms = [step_of(model, optimizer, step) for step in range(STEPS)]
    for name, param in model.named_parameters():
        sharded = process_world()[1] > 1 and ".experts." not in name
        assert is_sharded(param) == sharded and param.dtype == torch.float32, name
    if path is not None:
        training.save_checkpoint(path, model, optimizer, {"step": STEPS})
    state = training.full_state_dict(model)
    return norms, state, step_of(model, optimizer, STEPS)


def go_on(experts, path):
    """On another number of ranks: (whole state, norm of the next step)"""
    model, optimizer = make(experts)
    assert training.load_checkpoint(path, model, optimizer) == {"step": STEPS}
    return training.full_state_dict(model), step_of(model, optimizer, STEPS)


@functools.cache
def alone(experts):
    ((norms, state, after),) = run_ranks(train, 1, experts)
    assert max(norms) > 0.2  # clipped
    return norms, state, after


def assert_near(got, want, ratio):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert rms_ratio(got[name], value) < ratio, name


# on 4 ranks each of 2 experts is on two of them
@pytest.mark.parametrize("world_size, recompute", [(2, True), (4, False)])
def test_trains_like_one_process_and_loads_on_any_number(world_size, recompute, tmp_path):
    norms, state, after = alone(2)
    path = str(tmp_path / "set.pt")
    ranks = run_ranks(train, world_size, 2, recompute, False, path)
    for found, _, next_norm in ranks:
        assert found == pytest.approx(norms, rel=1e-5) and found == ranks[0][0]
        assert next_norm == pytest.approx(after, rel=1e-5)
    assert_near(ranks[0][1], state, 1e-6)
    for loaded_by in (1, 6 - world_size):
        found = run_ranks(go_on, loaded_by, 2, path)
        assert_near(found[0][0], ranks[0][1], 1e-12)  # the same bits
        assert all(norm == pytest.approx(after, rel=1e-5) for _, norm in found)


def test_half_precision_inside():
    norms, state, _ = alone(2)
    for found, whole, _ in run_ranks(train, 2, 2, False, True):
        assert found == pytest.approx(norms, rel=0.05) and found != pytest.approx(norms, rel=1e-5)
        if whole:
            assert_near(whole, state, 0.05)


def _wrong():
    model = Model(2)
    with pytest.raises(ValueError, match="a Linear is not a module of the model"):
        training.shard_dense(model, [nn.Linear(2, 2)])
    model = training.shard_dense(Model(2), [])  # all at once
    assert model(batch(0, 0)).shape == (ROWS // 2, 3)
    model(batch(0, 0)).square().mean().backward()
    with pytest.raises(ValueError, match="the model is sharded already"):
        training.shard_dense(model)


def test_wrong_blocks_and_a_second_call_are_refused():
    run_ranks(_wrong, 2)
