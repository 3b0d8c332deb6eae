"""Tutel's interface on 2 and 4 ranks, beside loops in fp64 with the parameters of all ranks."""

import os
import sys

import pytest
import torch
from helpers import tutel_loop
from helpers.commands import ROOT
from helpers.distributed import on_ranks
from torch.nn.functional import silu

from fairseq_tutel.distributed import process_world
from fairseq_tutel.integrations.tutel import moe, net, system

M, F, TOKENS = 6, 8, (11, 7, 9, 10)
# experts of a rank (-S: an expert on S ranks), options of the layer, of the call, of the loop
CASES = [
    (2, {}, {"top_k": 3}, {"top_k": 3}),
    (1, {"is_postscore": False}, {"capacity_factor": 0.5}, {"factor": 0.5, "postscore": False}),
    (2, {"a2a_ffn_overlap_degree": 3}, {"capacity_factor": 0.5}, {"factor": 0.5, "alignment": 3}),
    (1, {"use_2dh": True}, {"capacity_factor": 0.0}, {"factor": 0.0}),
    (2, {"use_2dh": True, "a2a_ffn_overlap_degree": 2}, {}, {"alignment": 2}),
    (1, {"parallel_type": "adaptive:0"}, {}, {}),
    (-2, {}, {"top_k": 1, "capacity_factor": 0.5}, {"top_k": 1, "factor": 0.5, "alignment": 2}),
    (-2, {"parallel_type": "model"}, {"capacity_factor": -0.5}, {"factor": -0.5, "alignment": 2}),
    (0.5, {}, {"adaptive_r": 0}, {"alignment": 2}),
    (-2, {"is_postscore": False}, {"adaptive_r": 2}, {"alignment": 2, "postscore": False}),
    (-4, {}, {"adaptive_r": 2, "top_k": 1}, {"top_k": 1, "alignment": 4}),
    (-4, {}, {"adaptive_r": 4, "a2a_ffn_overlap_degree": 2}, {"alignment": 8}),
]


def whole(layer):
    """Parameters of the experts of all ranks, differentiable."""
    found = {}
    for name, param in layer.experts.named_parameters():
        parts = net.simple_all_gather(param.detach()[None])
        found[name] = parts.reshape(layer.num_global_experts, -1, *param.shape[2:])
    width = layer.experts.output_dim
    found["batched_fc2_bias"] = found["batched_fc2_bias"][:, :width].clone()
    return {name: value.requires_grad_() for name, value in found.items()}


def part_of(layer, name, grad):
    """This rank's part of a gradient, summed over the ranks."""
    grad, param = net.simple_all_reduce(grad), getattr(layer.experts, name)
    rank, world_size = process_world()
    experts = layer.num_global_experts
    missing = param.numel() * world_size - grad.numel()  # the last slice of a bias is padded
    grad = torch.nn.functional.pad(grad.view(experts, -1), (0, missing // experts))
    return grad.reshape(-1, param.numel())[rank].view(param.shape)


def make(experts, top_k=1, more=None, **options):
    experts = {"type": "ffn", "num_experts_per_device": experts, "hidden_size_per_expert": F}
    gate = {"type": "top", "k": top_k}
    return moe.moe_layer(gate, M, {**experts, **(more or {})}, **options).double()


def check_layer(experts, options, call, in_loop):
    rank, world_size = process_world()
    more = {"activation_fn": silu, "output_dim": 5}
    layer = make(experts, 2, more, seeds=(1, rank + 1, 1), **options)
    params = whole(layer)
    expert = tutel_loop.ffn(params, silu)
    tokens = TOKENS[rank] if call.get("capacity_factor", 1) <= 0 else 16
    torch.manual_seed(rank)
    data, found = torch.randn(tokens, M).double(), {}
    with_all = {"top_k": 2, "factor": 1.0, "most": most} | in_loop
    for name in ("layer", "loop"):
        x = data.clone().requires_grad_()
        layer.zero_grad()
        if name == "layer":
            y, loss = layer(x, inequivalent_tokens=True, **call), layer.l_aux
        else:
            y, loss = tutel_loop.layer(x, layer.gates[0](x), expert, **with_all)
        ((rank + 1) * y.square().sum() + loss).backward()
        if name == "layer":
            grads = {name: param.grad for name, param in layer.experts.named_parameters()}
        else:
            grads = {each: part_of(layer, each, param.grad) for each, param in params.items()}
        found[name] = [y, loss, x.grad, layer.gates[0].wg.weight.grad, grads]
    torch.testing.assert_close(found["layer"], found["loop"], rtol=1e-9, atol=1e-9)


def most(needed):
    return int(net.simple_all_gather(torch.tensor([needed])).max())


def check_uneven_tokens():
    """Ranks may have any number of tokens; the largest decides the capacity."""
    rank, _ = process_world()
    layer = make(1, seeds=(1, rank, 1))
    x = torch.randn(TOKENS[rank] * (rank > 0), M).double()
    expert = tutel_loop.ffn(whole(layer), torch.relu)
    for r in (1, 0):
        y = layer(x, capacity_factor=9.0, adaptive_r=r)
        if rank:
            wanted, _ = tutel_loop.layer(x, layer.gates[0](x), expert, 1, 99.0)
            torch.testing.assert_close(y, wanted)
        assert y.shape == x.shape
    with pytest.raises(ValueError, match="top_k=1, factor=0, r=0 on rank"):
        layer(x, capacity_factor=min(rank, 1))


def joined(every, input_dim, output_dim):
    """Rank r's part of ``output_dim`` of every rank's tensor, along ``input_dim``."""
    rank, world_size = process_world()
    return torch.cat([each.chunk(world_size, output_dim)[rank] for each in every], input_dim)


COLLECTIVES = {
    "1 to 0": (lambda x: net.all_to_all(x, 1, 0), lambda a: joined(a, 1, 0)),
    "0 to 1": (lambda x: net.all_to_all(x, 0, 1, background=True)(), lambda a: joined(a, 0, 1)),
    "2 to 1": (lambda x: net.all_to_all(x, 2, 1, use_2dh=True), lambda a: joined(a, 2, 1)),
    "none": (lambda x: net.all_to_all(x, 1, 1), lambda a: a[process_world()[0]]),
    "gather": (lambda x: net.all_gather(x, 1, fused=True), lambda a: torch.cat([*a], 1)),
    "slices": (net.zero_gather, lambda a: torch.cat([*a])),
    "shape": (lambda x: net.zero_gather(x, [5]), lambda a: torch.cat([*a]).flatten()[:5]),
}


def check_collectives():
    """Values are those of the definition, and gradients those of a linear map."""
    rank, world_size = process_world()
    torch.manual_seed(5)
    every = torch.randn(world_size, 2 * world_size, world_size, 3).double()
    for name, (call, definition) in COLLECTIVES.items():
        x = every[rank].clone().requires_grad_()
        y = call(x)
        assert torch.equal(y, definition(every)), name
        weight = torch.randn(world_size, *y.shape).double()[rank]
        (y * weight).sum().backward()
        forward, backward = ((a * b).sum().detach() for a, b in ((y, weight), (x, x.grad)))
        both = net.simple_all_reduce(torch.stack([forward, backward]))
        torch.testing.assert_close(both[0], both[1])
    x = every[rank].clone().requires_grad_()
    net.all_gather(x, 0)[rank * len(x) :].sum().backward()  # each rank has its own gradient
    assert torch.equal(x.grad, torch.ones_like(x))
    assert net.simple_all_reduce(torch.ones(2)).tolist() == [world_size] * 2
    largest = net.simple_all_reduce(torch.tensor(rank), op=torch.distributed.ReduceOp.MAX)
    assert largest == world_size - 1
    net.barrier()


def check_groups():
    """Model groups are of neighbours, and a layer in one knows its ranks alone."""
    rank, world_size = process_world()
    session = system.init_data_model_parallel(world_size // 2, backend="gloo")
    assert session.local_device == torch.device("cpu") and session.is_distributed
    assert (session.data_rank, session.model_rank) == divmod(rank, 2)
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    assert torch.distributed.get_process_group_ranks(session.model_group) == pair
    ranks = torch.distributed.get_process_group_ranks(session.data_group)
    assert ranks == list(range(rank % 2, world_size, 2))
    alone = net.create_groups_from_world(world_size).model_group
    assert net.get_world_size(alone) == 1
    layer = make(-2, seeds=(1, rank % 2, 1), group=session.model_group)
    assert layer.num_global_experts == 1 and layer.valid_rs == [0, 1, 2]
    x = torch.randn(4, M).double()
    first = layer(x, adaptive_r=1)
    for r in (0, 2):
        torch.testing.assert_close(layer(x, adaptive_r=r), first)
    everywhere = net.simple_all_gather(first[None])
    torch.testing.assert_close(everywhere, first.expand_as(everywhere))
    if world_size == 4:
        with pytest.raises(ValueError, match=r"group: its ranks \[[01], [23]\] must be neighbours"):
            make(-2, group=session.data_group)
    with pytest.raises(ValueError, match="group_count=3 does not divide"):
        net.create_groups_from_world(3)


def check_optimizer():
    """Steps are those of an optimizer whose shared gradients are reduced."""
    rank, world_size = process_world()
    for averaged in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (2,), (4,))]
        vars(params[2])["expert"] = True
        plain = [torch.nn.Parameter(param.detach().clone()) for param in params]
        sharded = net.TutelDistributedOptimizer(params, average_shared=averaged)
        optimizers = [sharded.warp_local(torch.optim.Adam, lr=0.1), torch.optim.Adam(plain, lr=0.1)]
        for _ in range(3):
            for param, other in zip(params, plain, strict=True):
                param.grad = torch.randn(param.shape) + rank
                other.grad = param.grad
                if param is not params[2]:
                    total = net.simple_all_reduce(param.grad)
                    other.grad = total / world_size if averaged else total
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(params, plain)


def check_files():
    """Weights of Swin-MoE, as Tutel's ranks wrote them, load and come back."""
    sys.path.insert(0, str(ROOT / "scripts" / "examples" / "swin_moe"))
    import convert

    rank, world_size = process_world()
    name, gate = {2: ("cosine", {"proj_dim": 8}), 4: ("slices", {})}[world_size]
    files = ROOT / "tests" / "examples" / "swin_moe_files" / f"{name}.pth"
    state = convert._read_files(str(files))[1][rank]
    start = "layers.0.blocks.0.mlp._moe_layer."
    state = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    experts = {"type": "ffn", "count_per_node": 2 if world_size == 2 else -2}
    gate |= {"type": "cosine_top" if gate else "top"}
    layer = moe.moe_layer(gate, 8, experts | {"hidden_size_per_expert": 32})
    layer.load_state_dict(state)
    torch.testing.assert_close(dict(layer.state_dict()), state, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_ranks_compute_what_one_process_would(world_size):
    os.environ["LOCAL_SIZE"] = "2"
    for experts, options, call, in_loop in CASES:
        if world_size % max(1, -experts) == 0:
            check_layer(experts, options, call, in_loop)
    check_uneven_tokens()
    check_collectives()
    check_groups()
    check_optimizer()
    check_files()
