"""One gradient rule for experts, and a norm that every rank sees."""

import functools
import itertools
import math

import pytest
import torch
from helpers.distributed import on_ranks, run_ranks
from torch import nn

from fairseq_tutel.distributed import build_groups, is_expert, mark_expert, process_world
from fairseq_tutel.training import expert_grad_sq_norm, reduce_expert_grads

W = 4
EXPERTS = (1, 2, 4, 8)
PLACED = [(experts, 0) for experts in EXPERTS] + [(2, 1), (6, 2), (8, 1)]  # (E, S)


def _params(groups, rank):
    """A dense parameter and two of experts; the second's gradient is missing on rank 1."""
    dense = nn.Parameter(torch.zeros(3))
    experts = [mark_expert(nn.Parameter(torch.zeros(groups.num_local_experts, 2))) for _ in "ab"]
    dense.grad = torch.full((3,), 100.0)
    for number, param in enumerate(experts):
        if rank != 1 or number == 0:
            rows = [[1.0 + rank + 10 * e, -1.0] for e in groups.local_experts]
            param.grad = torch.tensor(rows)
    return dense, experts


def _reduce():
    rank, _ = process_world()
    found = {}
    for num_experts, size in PLACED:
        groups = build_groups(num_experts, expert_parallel_size=size)
        for normalization in ("world_size", "sqrt_world_size"):
            dense, experts = _params(groups, rank)
            assert [is_expert(p) for p in (dense, *experts)] == [False, True, True]
            reduce_expert_grads([dense, *experts], groups, normalization)
            assert dense.grad.tolist() == [100.0] * 3
            grads = [None if p.grad is None else p.grad.clone() for p in experts]
            sq_norm = expert_grad_sq_norm([dense, *experts], groups)
            found[num_experts, size, normalization] = (grads, sq_norm.item(), sq_norm.dtype)
    return found


@functools.cache
def reduced():
    return run_ranks(_reduce, W)


@pytest.mark.parametrize("normalization", ["world_size", "sqrt_world_size"])
@pytest.mark.parametrize(("num_experts", "size"), PLACED)
def test_gradients_and_norm_follow_the_rule(num_experts, size, normalization):
    """Sum over all ranks / W, or sqrt(min(E, W)) times that, however the experts are placed."""
    exchange, sq_norm = size or min(num_experts, W), 0.0
    local = num_experts // exchange
    factor = (1 if normalization == "world_size" else math.sqrt(min(num_experts, W))) / W
    found = [each[num_experts, size, normalization] for each in reduced()]
    for expert, number in itertools.product(range(num_experts), range(2)):
        holders = range(expert // local, W, exchange)
        given = [r for r in holders if r != 1 or number == 0]
        want = [factor * sum(1.0 + r + 10 * expert for r in given), -factor * len(given)]
        for grads, _, _ in (found[rank] for rank in holders):
            grad = grads[number]
            got = [0.0, 0.0] if grad is None else grad[expert % local].tolist()
            assert got == pytest.approx(want)
        sq_norm += sum(v * v for v in want)
    for _, got, dtype in found:
        assert got == pytest.approx(sq_norm, rel=1e-6) and dtype == torch.float32


@on_ranks(W)
def test_overflow_on_one_rank_is_seen_by_all():
    rank, _ = process_world()
    for num_experts in EXPERTS:
        groups = build_groups(num_experts)
        for bad in (math.inf, math.nan):
            param = mark_expert(nn.Parameter(torch.zeros(groups.num_local_experts, 2)))
            param.grad = torch.ones_like(param)
            if rank == 2:
                param.grad[0, 1] = bad
            reduce_expert_grads([param], groups, "world_size")
            assert not math.isfinite(expert_grad_sq_norm([param], groups).item())
    half = mark_expert(nn.Parameter(torch.zeros(1, 2, dtype=torch.float16)))
    half.grad = torch.full_like(half, 1000.0)  # its square is out of fp16's range
    assert expert_grad_sq_norm([half], build_groups(W)).item() == pytest.approx(W * 2e6)


def test_frozen_experts_are_left_alone():
    param = mark_expert(nn.Parameter(torch.zeros(2), requires_grad=False))
    reduce_expert_grads([param], build_groups(4), "world_size")
    assert param.grad is None
