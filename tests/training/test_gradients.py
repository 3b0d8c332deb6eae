"""One gradient rule for experts, and a norm that every rank sees."""

import functools
import math

import pytest
import torch
from helpers.distributed import on_ranks, run_ranks
from torch import nn

from fairseq_tutel.distributed import build_groups, is_expert, mark_expert, process_world
from fairseq_tutel.training import expert_grad_sq_norm, reduce_expert_grads
from fairseq_tutel.training.gradients import average_expert_grad

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
            if not size:
                _compare_with_slices(num_experts, normalization, rank)
    return found


def _compare_with_slices(num_experts, normalization, rank):
    """What holders have of the sum over all ranks, against the same sum on each of them."""
    whole, sliced = (build_groups(num_experts, placement=p) for p in ("replicated", "sliced"))
    slices, index = sliced.num_slices, sliced.slice_index
    grads = [torch.arange(1.0, 9.0), torch.tensor([3.0, -7.0])]  # of 8 hidden units; of a bias
    for part in (1.0, 0.5):  # of every block, and as much elsewhere
        want = [mark_expert(nn.Parameter(torch.zeros_like(grad))) for grad in grads]
        units = nn.Parameter(torch.zeros(8 // slices))
        bias = nn.Parameter(torch.zeros(2))
        got = [mark_expert(units, copies=1), mark_expert(bias, copies=slices)]
        for param, grad in zip(want, grads, strict=True):
            param.grad = (1 + rank % whole.ep_size) * grad
        total = [param.grad * slices for param in want]
        units.grad = total[0].chunk(slices)[index].clone()
        if slices == 1 or part == 0.5 and index < 2:
            bias.grad = total[1] * (1 if slices == 1 else part)
        elif part == 1.0 and index == 1:
            bias.grad = total[1].clone()
        average = [average_expert_grad(p.grad, whole) for p in want]
        reduce_expert_grads(want, whole, normalization)
        pairs = [(units.grad, 1), (torch.zeros(2) if bias.grad is None else bias.grad, slices)]
        sliced_average = [average_expert_grad(grad, sliced, copies) for grad, copies in pairs]
        reduce_expert_grads(got, sliced, normalization)
        for a, b in ((average, sliced_average), (want, got)):
            a, b = ([x if x.grad is None else x.grad for x in each] for each in (a, b))
            torch.testing.assert_close(b[0], a[0].chunk(slices)[index])
            torch.testing.assert_close(b[1], a[1])
        torch.testing.assert_close(
            expert_grad_sq_norm(got, sliced), expert_grad_sq_norm(want, whole)
        )


@functools.cache
def reduced():
    return run_ranks(_reduce, W)


@pytest.mark.parametrize("normalization", ["world_size", "sqrt_world_size"])
@pytest.mark.parametrize(("num_experts", "size"), PLACED)
def test_gradients_and_norm_follow_the_rule(num_experts, size, normalization):
    """Sum over all ranks / W, or sqrt(min(E, W)) times that, however the experts are placed."""
    exchange = size or min(num_experts, W)
    replicas = W // exchange
    factor = 1 if normalization == "world_size" else math.sqrt(min(num_experts, W))
    sq_norm = 0.0
    for expert in range(num_experts):
        local = num_experts // exchange
        holders = [r for r in range(W) if r % exchange == expert // local]
        assert len(holders) == replicas
        for number in range(2):
            rows = [
                [1.0 + r + 10 * expert, -1.0] if r != 1 or number == 0 else [0.0, 0.0]
                for r in holders
            ]
            want = [sum(column) / W * factor for column in zip(*rows, strict=True)]
            for rank in holders:
                grads, _, _ = reduced()[rank][num_experts, size, normalization]
                if grads[number] is None:
                    assert want == [0.0, 0.0]
                else:
                    assert grads[number][expert % local].tolist() == pytest.approx(want)
            sq_norm += sum(v * v for v in want)
    for found in reduced():
        got, dtype = found[num_experts, size, normalization][1:]
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
