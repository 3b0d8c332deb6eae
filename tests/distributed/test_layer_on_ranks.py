"""A layer on W ranks against the same layer on one rank that sees all tokens; nothing dropped."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks

from fairseq_tutel.distributed import ExpertParallelGroups, build_groups, process_world
from fairseq_tutel.moe import ExchangeConfig, MoELayer

M, HIDDEN = 6, 8
EXPERTS = {2: (1, 2, 8), 4: (2, 4, 8)}
TOP_K = (1, 2, 4)
# capacities that drop nothing, and evaluation
MODES = {
    "padded": (8.0, True),
    "ragged": (0.0, True),
    "dynamic": (-8.0, True),
    "evaluation": (1.0, False),
}
SPLITS = {"even": (6, 6, 6, 6), "uneven, one empty": (9, 0, 2, 13)}
CASES = {
    w: [c for c in itertools.product(experts, TOP_K, MODES, SPLITS) if c[1] <= c[0]]
    for w, experts in EXPERTS.items()
}
# (E, S): every 2 ranks hold all experts
CASES[4] += [((1024, 2), 2, mode, "uneven, one empty") for mode in ("padded", "ragged")]


def _layer(num_experts, top_k, mode, groups, **options):
    factor, training = MODES[mode]
    torch.manual_seed(7)
    layer = MoELayer(
        M,
        num_experts,
        HIDDEN,
        top_k=top_k,
        capacity_factor=factor,
        seed=3,
        groups=groups,
        second_expert_policy="all",
        **options,
    )
    return layer.double().train(training)


def _inputs(world_size, split):
    torch.manual_seed(11)
    sizes = SPLITS[split][:world_size]
    shape = (sum(sizes), M)
    return torch.randn(shape).double(), torch.randn(shape).double(), sizes


def _run(layer, x, target):
    x = x.clone().requires_grad_()
    y, aux = layer(x, return_aux=True)
    (y * target).sum().backward()
    return y.detach(), x.grad, aux.load_E


def _by_expert(layer):
    """Gradients of the experts on this rank, by global index and name."""
    return {
        (expert, name): param.grad[slot]
        for name, param in layer.experts.named_parameters()
        for slot, expert in enumerate(layer.groups.local_experts)
    }


def _compare_with_gathered_weights(found, case, groups, x, target):
    """r=0: inside a group the weights travel, not the tokens."""
    (num_experts, _), top_k, mode, _ = case
    layer = _layer(num_experts, top_k, mode, groups, exchange=ExchangeConfig(r=0))
    y, x_grad, _ = _run(layer, x, target)
    for got, want in ((y, found[0]), (x_grad, found[1])):  # one rank has no tokens
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)
    for key, grad in _by_expert(layer).items():
        assert torch.allclose(grad, found[3][key], rtol=1e-10, atol=1e-12), key


def _with_size(case):
    experts, *rest = case
    return experts if isinstance(experts, tuple) else (experts, 0), *rest


def _on_ranks():
    rank, world_size = process_world()
    found = {}
    for case in CASES[world_size]:
        (num_experts, size), top_k, mode, split = _with_size(case)
        x, target, sizes = _inputs(world_size, split)
        groups = build_groups(num_experts, expert_parallel_size=size)
        layer = _layer(num_experts, top_k, mode, groups)
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        y, x_grad, load = _run(layer, x[own], target[own])
        gate_grad = layer.gate.wg.weight.grad
        dist.all_reduce(gate_grad)
        dist.all_reduce(load)
        found[case] = (y, x_grad, gate_grad, _by_expert(layer), load)
        if size and mode == "ragged":
            _compare_with_gathered_weights(found[case], case, groups, x[own], target[own])
    return found


@functools.cache
def on_ranks(world_size):
    return run_ranks(_on_ranks, world_size, timeout=120)


@pytest.mark.parametrize("world_size, case", [(w, c) for w in CASES for c in CASES[w]], ids=str)
def test_outputs_and_gradients_equal_one_rank(world_size, case):
    (num_experts, _), top_k, mode, split = _with_size(case)
    x, target, _ = _inputs(world_size, split)
    whole = _layer(num_experts, top_k, mode, ExpertParallelGroups(num_experts))
    y, x_grad, load = _run(whole, x, target)
    parts = [found[case] for found in on_ranks(world_size)]
    assert rms_ratio(torch.cat([part[0] for part in parts]), y) < 1e-12
    assert rms_ratio(torch.cat([part[1] for part in parts]), x_grad) < 1e-12
    sums = {}
    for part in parts:
        assert rms_ratio(part[2], whole.gate.wg.weight.grad) < 1e-12 or top_k == num_experts == 1
        assert torch.equal(part[4], load)
        # replicas hold the gradients of their own blocks: together they are the whole
        for key, grad in part[3].items():
            sums[key] = sums.get(key, 0) + grad
    want = _by_expert(whole)
    assert set(sums) == set(want)
    assert sum(bool(grad.any()) for grad in want.values()) > min(len(want) / 2, 4 * 12)
    for key, grad in want.items():
        assert rms_ratio(sums[key], grad) < 1e-12, key


def _with_own_capacity():
    """Capacity 1.0 with equal token counts: each rank drops as it would alone."""
    rank, world_size = process_world()
    x, target, _ = _inputs(world_size, "even")
    own = slice(6 * rank, 6 * rank + 6)
    results = []
    for groups in (build_groups(4), ExpertParallelGroups(4)):
        torch.manual_seed(7)
        layer = MoELayer(M, 4, HIDDEN, top_k=2, seed=3, groups=groups).double()
        torch.manual_seed(rank)  # policy "sampling" everywhere, by each rank's own noise
        layer.config = type(layer.config)(num_experts=4, second_expert_policy="sampling")
        y, x_grad, _ = _run(layer, x[own], target[own])
        results.append((y, x_grad))
    (y, x_grad), (want, want_grad) = results
    assert rms_ratio(y, want) < 1e-12 and rms_ratio(x_grad, want_grad) < 1e-12
    return int((y.abs().sum(1) == 0).sum())


def test_every_rank_drops_by_its_own_tokens():
    run_ranks(_with_own_capacity, 4)


def _skipped_exchange():
    rank, world_size = process_world()
    for factor in (1.0, 0.0):
        layer = MoELayer(M, 4, HIDDEN, skip_exchange=True, capacity_factor=factor)
        x = torch.randn(12, M, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.shape and torch.isfinite(y).all() and torch.isfinite(x.grad).all()


def test_skipped_exchange_runs_on_every_rank():
    run_ranks(_skipped_exchange, 2)
