"""A PyTorch model with an MoE layer under DistributedDataParallel equals it on one rank."""

import copy
import math

import pytest
import torch
from helpers.distributed import RanksFailed, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fairseq_tutel import moe
from fairseq_tutel.distributed import ExpertParallelGroups, process_world
from fairseq_tutel.hosts import (
    clip_grad_norm_,
    expert_parameters,
    grad_scaler,
    prepare_data_parallel,
    wrap_data_parallel,
)
from fairseq_tutel.moe import MoELayer

DIM, PER_RANK, STEPS, MAX_NORM = 8, 6, 5, 0.1


class Model(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.moe = MoELayer(DIM, num_experts, 2 * DIM, capacity_factor=0.0, seed=3)

    def forward(self, x):
        # without the aux loss, which is not linear in the tokens of a rank
        return x + self.moe(self.inner(x))


def wrap(model, how):
    if how == "wrap":
        return wrap_data_parallel(model)
    prepare_data_parallel(model)
    if how == "plain":
        return nn.parallel.DistributedDataParallel(model)
    if how == "copy":  # a copied module has lost marks and hooks
        model.moe.experts = copy.deepcopy(model.moe.experts)
        prepare_data_parallel(model)
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard  # torch 2.6

    mesh = init_device_mesh("cpu", (process_world()[1],))
    return fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model)))


def clip(model, how):
    """One process clips with torch's own, whose result is the reference."""
    if process_world()[1] == 1:
        return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return clip_grad_norm_(model, MAX_NORM)


def train(num_experts, ranks, how="wrap"):
    """State after some clipped steps of SGD on the mean loss, experts by global index; norms."""
    rank, world_size = process_world()
    torch.manual_seed(0)
    model = Model(num_experts)
    groups = model.moe.groups
    net = wrap(model, how) if world_size > 1 else model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    norms = []
    for step in range(STEPS):
        x = torch.randn(ranks * PER_RANK, DIM, generator=torch.Generator().manual_seed(step))
        mine = x if world_size == 1 else x[rank * PER_RANK : (rank + 1) * PER_RANK]
        optimizer.zero_grad()
        net(mine).square().mean().backward()
        norms.append(clip(net, how).item())
        optimizer.step()
    state = {}
    for name, value in model.state_dict().items():
        head, _, tail = name.partition("experts.")
        if tail:
            slot, _, rest = tail.partition(".")
            name = f"{head}experts.{groups.local_experts[int(slot)]}.{rest}"
        state[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return state, norms


@pytest.mark.parametrize(
    ("num_experts", "ranks", "how"),
    [(4, 2, "wrap"), (2, 2, "plain"), (2, 4, "wrap"), (4, 2, "copy"), (2, 4, "fsdp")],
)
def test_equals_one_rank(num_experts, ranks, how):
    ((expected, want_norms),) = run_ranks(train, 1, num_experts, ranks)
    results = run_ranks(train, ranks, num_experts, ranks, how)
    assert min(want_norms) > 1.2 * MAX_NORM  # clipping was active
    seen = set()
    for state, norms in results:
        assert norms == results[0][1] and norms == pytest.approx(want_norms, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)
            if "experts" not in name:
                assert torch.equal(value, results[0][0][name]), f"{name} drifted"
        seen |= set(state)
    assert seen == set(expected)


def freeze_some():
    """One step with half of the experts' parameters frozen: they stay, the others learn."""
    torch.manual_seed(0)
    model = Model(2)
    experts = model.moe.experts
    experts.fc1_weight.requires_grad_(False)
    experts.fc1_bias.requires_grad_(False)
    net = wrap_data_parallel(model)
    net(torch.randn(PER_RANK, DIM)).square().mean().backward()
    return {name: param.grad is not None for name, param in experts.named_parameters()}


def test_frozen_experts():
    for has_grad in run_ranks(freeze_some, 2):
        assert has_grad == {
            "fc1_weight": False, "fc1_bias": False, "fc2_weight": True, "fc2_bias": True
        }  # fmt: skip


def wrap_wrongly():
    """Plain DistributedDataParallel, and a layer that was built for other ranks."""
    net = nn.parallel.DistributedDataParallel(Model(2))
    with pytest.raises(ValueError, match="moe.experts.*wrap_data_parallel"):
        net(torch.randn(PER_RANK, DIM))
    net = wrap_data_parallel(Model(2))
    net(torch.randn(PER_RANK, DIM)).sum().backward()
    model = Model(2)
    model.moe.groups = ExpertParallelGroups(2)  # as if built before init_process_group
    with pytest.raises(ValueError, match="built for 1 ranks, and there are 2: build the model aft"):
        wrap_data_parallel(model)


def test_wrong_wrapping_is_refused():
    run_ranks(wrap_wrongly, 2)


def local_clip():
    """torch's own clip with the check, and without it."""
    found = []
    for check_replicas in (True, False):
        torch.manual_seed(0)
        model = Model(2)
        prepare_data_parallel(model, check_replicas=check_replicas)
        net = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(process_world()[0])
        try:
            for _ in range(STEPS):
                optimizer.zero_grad()
                net(torch.randn(PER_RANK, DIM)).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
                optimizer.step()
            found.append(model.inner.weight.detach())
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_clip_of_one_rank_alone_is_refused():
    results = run_ranks(local_clip, 2)
    for message, _ in results:
        assert "dense gradients differ" in message and "hosts.clip_grad_norm_" in message
    assert not torch.equal(results[0][1], results[1][1])  # what is refused


def overflow(own):
    """Scales and dense weights of five steps; rank 1's expert overflows in the second."""
    rank, _ = process_world()
    torch.manual_seed(0)
    model = Model(2)
    net = wrap_data_parallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"init_scale": 8.0, "growth_interval": 2}
    scaler = grad_scaler("cpu", **options) if own else torch.amp.GradScaler("cpu", **options)
    torch.manual_seed(rank)
    scales, weights, norms = [], [], []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(PER_RANK, DIM)).square().mean()).backward()
        if step == 1 and rank == 1:
            model.moe.experts.fc2_bias.grad[0, 0] = math.inf
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(net, MAX_NORM).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(model.inner.weight.detach().clone())
    return scales, weights, norms


def test_an_overflow_of_one_rank_makes_all_skip():
    (scales, weights, norms), other = run_ranks(overflow, 2, True)
    assert scales == other[0] == [8.0, 4.0, 4.0, 8.0, 8.0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, other[1], strict=True))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert norms == pytest.approx(other[2], nan_ok=True) and not math.isfinite(norms[1])
    assert all(math.isfinite(norm) for norm in norms[:1] + norms[2:])


def test_an_overflow_that_one_rank_alone_sees_is_refused():
    with pytest.raises(RanksFailed, match="optimizer steps since the last .*hosts.grad_scaler"):
        run_ranks(overflow, 2, False, timeout=30)


def test_nonfinite_norm_can_be_an_error():
    model = Model(2)
    model(torch.full((1, DIM), math.inf)).sum().backward()
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="Linear has no MoELayer"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0)


def test_the_old_name_goes_on_to_work():
    assert moe.wrap_data_parallel is wrap_data_parallel
    with pytest.raises(AttributeError, match="no attribute 'wrap_in_parallel'"):
        _ = moe.wrap_in_parallel


def one_expert():
    """Ranks that exchange nothing may make different numbers of forward passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), MoELayer(DIM, 1, 2 * DIM, top_k=1))
    net = wrap_data_parallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(1 + process_world()[0]):
            model(torch.randn(PER_RANK, DIM))
        net(torch.randn(PER_RANK, DIM)).square().mean().backward()
        clip_grad_norm_(net, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def test_replicas_of_one_expert_stay_equal():
    for mine, theirs in zip(*run_ranks(one_expert, 2), strict=True):
        assert torch.equal(mine, theirs)
