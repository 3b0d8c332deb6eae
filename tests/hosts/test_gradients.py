"""One gradient rule for experts, and a norm that every rank sees."""

import functools
import math

import pytest
import torch
from helpers.distributed import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_tutel.distributed import build_groups, is_expert, mark_expert, process_world
from fairseq_tutel.hosts import expert_grad_sq_norm, reduce_expert_grads

W = 4
EXPERTS = (1, 2, 4, 8)


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


class _Multiplications(TorchDispatchMode):
    """Counts what multiplies."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "mul" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def _reduce():
    rank, _ = process_world()
    found = {}
    for num_experts in EXPERTS:
        groups = build_groups(num_experts)
        for normalization in ("world_size", "sqrt_world_size"):
            dense, experts = _params(groups, rank)
            assert [is_expert(p) for p in (dense, *experts)] == [False, True, True]
            with _Multiplications() as multiplications:
                reduce_expert_grads([dense, *experts], groups, normalization)
            assert multiplications.count == 1  # however many parameters there are
            assert dense.grad.tolist() == [100.0] * 3
            grads = [None if p.grad is None else p.grad.clone() for p in experts]
            sq_norm = expert_grad_sq_norm([dense, *experts], groups)
            found[num_experts, normalization] = (grads, sq_norm.item(), sq_norm.dtype)
    return found


@functools.cache
def reduced():
    return run_ranks(_reduce, W)


@pytest.mark.parametrize("normalization", ["world_size", "sqrt_world_size"])
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_gradients_and_norm_follow_the_rule(num_experts, normalization):
    """Sum over replicas / W, or over replicas / (replicas * sqrt(exchange size))."""
    exchange = min(num_experts, W)
    replicas = W // exchange
    divisor = exchange if normalization == "world_size" else math.sqrt(exchange)
    sq_norm = 0.0
    for expert in range(num_experts):
        local = max(1, num_experts // W)
        holders = [r for r in range(W) if r % exchange == expert // local]
        assert len(holders) == replicas
        for number in range(2):
            rows = [
                [1.0 + r + 10 * expert, -1.0] if r != 1 or number == 0 else [0.0, 0.0]
                for r in holders
            ]
            want = [sum(column) / replicas / divisor for column in zip(*rows, strict=True)]
            for rank in holders:
                grads, _, _ = reduced()[rank][num_experts, normalization]
                if grads[number] is None:
                    assert want == [0.0, 0.0]
                else:
                    assert grads[number][expert % local].tolist() == pytest.approx(want)
            sq_norm += sum(v * v for v in want)
    for found in reduced():
        got, dtype = found[num_experts, normalization][1:]
        assert got == pytest.approx(sq_norm, rel=1e-6) and dtype == torch.float32


def _overflow():
    rank, _ = process_world()
    results = []
    for num_experts in EXPERTS:
        groups = build_groups(num_experts)
        for bad in (math.inf, math.nan):
            param = mark_expert(nn.Parameter(torch.zeros(groups.num_local_experts, 2)))
            param.grad = torch.ones_like(param)
            if rank == 2:
                param.grad[0, 1] = bad
            reduce_expert_grads([param], groups, "world_size")
            results.append(math.isfinite(expert_grad_sq_norm([param], groups).item()))
    half = mark_expert(nn.Parameter(torch.zeros(1, 2, dtype=torch.float16)))
    half.grad = torch.full_like(half, 1000.0)  # its square is out of fp16's range
    results.append(expert_grad_sq_norm([half], build_groups(W)).item())
    return results


def test_overflow_on_one_rank_is_seen_by_all():
    for found in run_ranks(_overflow, W):
        assert found[:-1] == [False] * (2 * len(EXPERTS))
        assert found[-1] == pytest.approx(W * 2e6)


def test_one_rank_divides_by_nothing():
    param = mark_expert(nn.Parameter(torch.zeros(2)))
    param.grad = torch.ones(2)
    for normalization in ("world_size", "sqrt_world_size"):
        reduce_expert_grads([param], build_groups(4), normalization)
    assert param.grad.tolist() == [1.0, 1.0]
    assert expert_grad_sq_norm([param], build_groups(4)).item() == pytest.approx(2.0)
    assert expert_grad_sq_norm([], build_groups(4)).item() == 0.0


def test_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match="'mean' is unknown; .*world_size, sqrt_world_size"):
        reduce_expert_grads([], build_groups(4), "mean")


def test_frozen_experts_are_left_alone():
    param = mark_expert(nn.Parameter(torch.zeros(2), requires_grad=False))
    reduce_expert_grads([param], build_groups(4), "world_size")
    assert param.grad is None
