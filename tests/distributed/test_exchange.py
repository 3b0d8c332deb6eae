"""All-to-all and the whole dispatch-combine round trip on 1, 2 and 4 gloo ranks."""

import functools

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks

from fairseq_tutel.distributed import (
    ExpertParallelGroups,
    agree_step,
    all_to_all,
    all_to_all_uneven,
    build_groups,
    exchange_counts,
    process_world,
)
from fairseq_tutel.moe import MoEConfig, dispatch_and_combine, route

# capacity factor of the padded and of the ragged layouts
LAYOUTS = {"padded": 1.0, "padded, nothing dropped": 8.0, "ragged": 0.0, "ragged, bounded": -0.5}
WORLDS = {1: (1, 4), 2: (1, 2, 4), 4: (2, 4, 8)}  # ranks -> experts: fewer, equal, more
M = 5


def _tokens(rank):
    """Different on every rank; rank 1 has none."""
    return [9, 0, 14, 1][rank]


def _exchanges():
    rank, size = process_world()
    groups = build_groups(2 * size)
    # rows say where they come from and where they go
    rows = torch.tensor([[rank, to, i] for to in range(size) for i in range(3)]).double()
    got = all_to_all(rows.requires_grad_(), groups)
    assert got.tolist() == [[by, rank, i] for by in range(size) for i in range(3)]
    (got * torch.arange(len(got))[:, None]).sum().backward()
    # row i of the part that came from rank r was number 3r + i there, so was its factor
    assert rows.grad.tolist() == [[3 * rank + i] * 3 for _ in range(size) for i in range(3)]

    # rank r sends 2r + to rows to rank `to`, none from 0 to 0
    send, receive = ([2 * rank + to for to in range(size)], [2 * by + rank for by in range(size)])
    rows = torch.tensor([[rank, to, i] for to in range(size) for i in range(send[to])]).double()
    rows = rows.reshape(-1, 3).requires_grad_()
    got = all_to_all_uneven(rows, send, receive, groups)
    assert got.tolist() == [[by, rank, i] for by in range(size) for i in range(receive[by])]
    (10 * rank * got).sum().backward()
    assert rows.grad.tolist() == [[10 * to] * 3 for to in range(size) for _ in range(send[to])]

    count = torch.tensor([100 * rank + e for e in range(2 * size)], dtype=torch.int32)
    table = exchange_counts(count, groups).tolist()
    assert table == [[100 * by + 2 * rank, 100 * by + 2 * rank + 1] for by in range(size)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchanges_and_their_gradients(world_size):
    run_ranks(_exchanges, world_size)


def _round_trips():
    """Experts that give back what they get: the layer is the sum of the weights that were kept."""
    rank, world_size = process_world()
    errors = {}
    for num_experts in WORLDS[world_size]:
        groups = build_groups(num_experts)
        for layout, factor in LAYOUTS.items():
            top_k = min(2, num_experts)
            config = MoEConfig(num_experts=num_experts, top_k=top_k, capacity_factor=factor,
                               normalize_before_dropping=True, second_expert_policy="all")
            torch.manual_seed(rank)
            x = torch.randn(_tokens(rank), M, dtype=torch.float64, requires_grad=True)
            logits = torch.randn(len(x), num_experts, dtype=torch.float64)
            logits[:, 0] += 4  # a favourite, so that some tokens are dropped
            logits.requires_grad_()
            step = agree_step(len(x), {}, groups)
            routing, _ = route(logits, config, training=True, num_tokens=step.num_tokens)
            assert routing.padded == (factor > 0)
            y = dispatch_and_combine(x, routing, lambda batch: batch.rows, groups)
            target = torch.randn_like(x)
            (y * target).sum().backward()
            other_x = x.detach().clone().requires_grad_()
            other_logits = logits.detach().clone().requires_grad_()
            routing, _ = route(other_logits, config, training=True, num_tokens=step.num_tokens)
            want = other_x * routing.topk_weight_TK.sum(1, keepdim=True)
            (want * target).sum().backward()
            pairs = {"y": (y, want), "x": (x.grad, other_x.grad),
                     "logits": (logits.grad, other_logits.grad)}
            dropped = int((routing.dest_row_TK < 0).sum())
            errors[num_experts, layout] = (
                {name: rms_ratio(*pair) if len(x) else 0.0 for name, pair in pairs.items()},
                dropped,
            )
    return errors


@functools.cache
def round_trips(world_size):
    return run_ranks(_round_trips, world_size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "world_size, num_experts", [(w, e) for w, experts in WORLDS.items() for e in experts]
)
def test_round_trip_is_the_weighted_identity(world_size, num_experts, layout):
    dropped = 0
    for rank, errors in enumerate(round_trips(world_size)):
        ratios, drops = errors[num_experts, layout]
        dropped += drops
        assert max(ratios.values()) < 1e-12, (rank, ratios)
    if layout in ("ragged", "padded, nothing dropped"):
        assert dropped == 0
    elif num_experts > 2 or layout == "ragged, bounded":
        assert dropped > 0  # or the case would test nothing new


def test_simulated_exchange_copies_as_many_rows():
    groups = build_groups(8, simulate_world_size=4)
    rows = torch.arange(24.0).view(12, 2).requires_grad_()
    for got in (all_to_all(rows, groups), all_to_all_uneven(rows, [3] * 4, [3] * 4, groups)):
        assert torch.equal(got, rows) and got.data_ptr() != rows.data_ptr()
        # the gradient travels too, also one that takes no memory of its own
        for dy in (torch.randn(12, 2), torch.ones(()).expand(12, 2)):
            (d_rows,) = torch.autograd.grad(got, rows, dy, retain_graph=True)
            assert torch.equal(d_rows, dy) and d_rows.data_ptr() != dy.data_ptr()
            assert d_rows.is_contiguous()
    assert exchange_counts(torch.arange(8), groups).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_one_rank_does_not_copy():
    rows = torch.randn(3, 2)
    assert all_to_all(rows, ExpertParallelGroups(4)) is rows
