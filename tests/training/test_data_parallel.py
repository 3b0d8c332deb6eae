"""What data parallelism around experts refuses, freezes and shards; training: test_toy_host.py."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import RanksFailed, on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairseq_tutel import training
from fairseq_tutel.distributed import ExpertParallelGroups, build_groups, process_world, share_out
from fairseq_tutel.moe import MoELayer, replace_ffn

DIM, PER_RANK, MAX_NORM = 8, 6, 0.1


class Model(nn.Module):
    def __init__(self, num_experts, **options):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        hidden = None if options else 2 * DIM
        options = {"capacity_factor": 0.0, "top_k": min(2, num_experts), **options}
        self.moe = MoELayer(DIM, num_experts, hidden, seed=3, **options)

    def forward(self, x):
        # without the aux loss, which is not linear in the tokens of a rank
        return x + self.moe(self.inner(x))


def shard(module, **options):
    from torch.distributed.fsdp import fully_shard  # torch 2.6

    return fully_shard(module, mesh=init_device_mesh("cpu", (process_world()[1],)), **options)


def unprepared(kind):
    """What a program forgets to prepare; its parameters."""
    model = Model(4)
    if kind in ("copied", "updated"):
        training.prepare_data_parallel(model)
    if kind == "copied":
        model = copy.deepcopy(model)
    if kind == "unfrozen":
        model.moe.experts.requires_grad_(False)
        training.prepare_data_parallel(model)
        model.moe.experts.requires_grad_(True)
    return model, training.add_lora(model) if kind == "updated" else list(model.parameters())


def step_alone(model, params):
    """A step as of one process; nobody averages dense gradients."""
    optimizer = torch.optim.SGD(params, lr=0.1)
    model(torch.randn(PER_RANK, DIM)).sum().backward()
    training.clip_grad_norm_(model, MAX_NORM)
    optimizer.step()


@on_ranks(2)
def test_wrong_wrapping_is_refused():
    for is_used in (False, True):
        model = Model(2)
        if is_used:
            model(torch.randn(PER_RANK, DIM))
        net = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match="moe.experts.*wrap_data_parallel"):
            net(torch.randn(PER_RANK, DIM))
    for kind in ("never", "copied", "updated", "unfrozen"):
        with pytest.raises(ValueError, match="not prepared .* net = .*wrap_data_parallel.model"):
            step_alone(*unprepared(kind))
    common = nn.Linear(DIM, DIM)
    make = lambda: nn.Sequential(nn.Linear(DIM, DIM), common)  # noqa: E731
    for options in ({"expert_fn": make}, {"experts": [make(), make()]}):
        with pytest.raises(ValueError, match="experts 0 and 1 of this rank share 1.weight"):
            Model(4, **options)
    model = Model(4, experts=[make(), nn.Linear(DIM, DIM)])
    model.inner = common
    with pytest.raises(ValueError, match="inner.weight is also moe.experts.0.1.weight"):
        training.wrap_data_parallel(model)
    # evaluation, frozen experts, and gradients that the program averages itself
    model = Model(4)
    model.moe.experts.requires_grad_(False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model = Model(4)
    model(torch.randn(PER_RANK, DIM)).sum().backward()
    training.reduce_expert_grads(model.parameters(), model.moe.groups)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    # experts on one rank are frozen: their replicas would wait for its gradients
    model = Model(1)
    model.moe.experts.fc1_weight.requires_grad_(process_world()[0] == 0)
    with pytest.raises(ValueError, match="disagree on the trained parameters of moe.experts: .*"):
        training.wrap_data_parallel(model)
    net = training.wrap_data_parallel(Model(2))
    net(torch.randn(PER_RANK, DIM)).sum().backward()
    # a disabled scaler asks nobody
    assert type(training.grad_scaler("cpu", enabled=False)) is torch.amp.GradScaler
    model = Model(2)
    model.moe.groups = ExpertParallelGroups(2)  # as if built before init_process_group
    with pytest.raises(ValueError, match="built for 1 ranks, and there are 2: build the model aft"):
        training.wrap_data_parallel(model)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_plain_fully_shard_is_refused(world_size):
    """fully_shard around experts, at every level of a model and after it was prepared."""
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.randn(PER_RANK, DIM)
    for before in (None, training.prepare_data_parallel, lambda model: model(x)):
        for level in ("", "moe", "moe.experts"):
            model = Model(4)
            if before is not None:
                before(model)
            shard(model.get_submodule(level))
            # as if the memory of the parameter that was checked is used again
            model.moe._checked_wrapper = (0, id(next(model.moe.experts.parameters())))
            with pytest.raises(ValueError, match="fully_shard would.*fc1_weight is.*ignored"):
                model(x)
    own = MoELayer(DIM, 2, gate=None, experts=[nn.Linear(DIM, DIM)] * (2 // world_size))
    with pytest.raises(ValueError, match=r"experts.0.weight is among its"):
        shard(own)(x)
    model = Model(4)
    shard(model.inner)
    for net in (model, shard(model, ignored_params=set(training.expert_parameters(model)))):
        net(x).sum().backward()


@on_ranks(2)
def test_a_clip_of_one_rank_alone_is_refused():
    for check in (True, False):
        model = Model(2)
        training.prepare_data_parallel(model, check_replicas=check)
        net = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(process_world()[0])
        refused = pytest.raises(ValueError, match="gradients differ .*training.clip_grad_norm_")
        with refused if check else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(PER_RANK, DIM)).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
                optimizer.step()


def overflow(make, fused=False):
    """Scales and dense weights of five steps; rank 1's expert overflows in the second.

    ``fused``: an optimizer that skips by itself, whose gradients nobody has unscaled.
    """
    rank, _ = process_world()
    torch.manual_seed(0)
    model = Model(2)
    net = training.wrap_data_parallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = make("cpu", init_scale=8.0, growth_interval=2)
    torch.manual_seed(rank)
    scales, weights = [], []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(PER_RANK, DIM)).square().mean()).backward()
        if step == 1 and rank == 1:
            model.moe.experts.fc2_bias.grad[0, 0] = math.inf
        if not fused:
            scaler.unscale_(optimizer)
            training.clip_grad_norm_(net, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(model.inner.weight.detach().clone())
    return scales, weights


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_rank_makes_all_skip(fused):
    (scales, weights), (others, theirs) = run_ranks(overflow, 2, training.grad_scaler, fused)
    assert scales == others == [8.0, 4.0, 4.0, 8.0, 8.0]
    assert all(map(torch.equal, weights, theirs))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_an_overflow_that_one_rank_alone_sees_is_refused():
    with pytest.raises(RanksFailed, match="optimizer steps since the last .*training.grad_scaler"):
        run_ranks(overflow, 2, torch.amp.GradScaler, timeout=30)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(DIM, DIM)
        self.register_buffer("counts", torch.randn(3).to(torch.bfloat16))


def seeded_by_rank(kind):
    """A model with two experts that each rank has drawn by itself."""
    torch.manual_seed(process_world()[0])
    options = {"top_k": 1, "capacity_factor": 0.0}
    if kind == "replaced":
        mlp = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, DIM))
        model = nn.Sequential(nn.Linear(DIM, DIM), mlp)
        replace_ffn(model, "^1$", 2, copy_weights=True, **options)
        return model
    options |= {
        "sliced": lambda: {"groups": build_groups(2, placement="sliced")},
        "expert_fn": lambda: {"expert_fn": Counting},
        "experts": lambda: {"experts": [Counting() for _ in build_groups(2).local_experts]},
    }.get(kind, dict)()
    layer = MoELayer(DIM, 2, None if kind.startswith("expert") else 16, **options)
    layer.experts.requires_grad_(kind != "frozen")
    return nn.Sequential(nn.Linear(DIM, DIM), layer)


@pytest.mark.parametrize("prepare", ["prepare_data_parallel", "shard_dense"])
@on_ranks(4)
def test_ranks_seeded_differently_hold_equal_replicas(prepare):
    """Ranks 0 and 2 hold one expert, 1 and 3 the other; the first of each keeps its values."""
    rank = process_world()[0]
    for kind in ("stacked", "frozen", "expert_fn", "experts", "replaced", "sliced"):
        model = seeded_by_rank(kind)
        experts = model[1].experts
        names = dict([*experts.named_parameters(), *experts.named_buffers()])
        drawn = {name: tensor.detach().clone() for name, tensor in names.items()}
        getattr(training, prepare)(model)
        for name, tensor in names.items():
            found, before = ([torch.empty_like(tensor) for _ in range(4)] for _ in range(2))
            dist.all_gather(found, tensor.detach())
            dist.all_gather(before, drawn[name])
            kept = kind == "sliced" and name != "fc2_bias"
            assert torch.equal(tensor, before[rank if kept else rank % 2]), (kind, name)
            is_zero = not drawn[name].any()
            assert is_zero or torch.equal(found[0], found[2]) == (not kept), (kind, name)


@on_ranks(4)
def test_gradients_are_accumulated_without_the_exchange_of_dense_ones():
    """Two experts have a replica each."""
    grads = []
    for sync in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, DIM), MoELayer(DIM, 2, 16, top_k=1))
        net = training.wrap_data_parallel(model)
        drawn = torch.Generator().manual_seed(process_world()[0])
        for last in (False, False, True):
            x = torch.randn(6, DIM, generator=drawn)
            with contextlib.nullcontext() if sync or last else net.no_sync():
                net(x).square().mean().backward()
        training.clip_grad_norm_(net, 0.5)
        grads.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*grads)


@on_ranks(2)
def test_a_rank_steps_its_own_experts_and_some_of_the_rest():
    layers = nn.Linear(4, 40), nn.Linear(40, 4), MoELayer(4, 2, hidden_dim=8, seed=0)
    model = nn.Sequential(*layers)
    matrices, _ = training.matrix_parameters(model)
    optimizer = torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
    for _ in range(2):  # once more changes nothing
        training.shard_optimizer(optimizer)
    training.wrap_data_parallel(model)(torch.randn(6, 4)).square().sum().backward()
    training.clip_grad_norm_(model, 0.5)
    optimizer.step()
    late = torch.optim.AdamW(layers[0].parameters())
    late.step()
    with pytest.raises(ValueError, match="before it has state"):
        training.shard_optimizer(late)
    # the matrices of an expert, and one of two of linear layers; the gate's is with the first
    assert len(optimizer.state) == 2 + (2, 1)[process_world()[0]]


def test_tensors_are_shared_out_evenly():
    assert share_out([3, 8, 3, 5, 1], 2) == [1, 0, 0, 1, 1]
    assert share_out([], 3) == [] and share_out([1, 1], 1) == [0, 0]
    sizes, loads = [(7 * i) % 23 + 1 for i in range(100)], [0] * 4
    for size, owner in zip(sizes, share_out(sizes, 4), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= 1
