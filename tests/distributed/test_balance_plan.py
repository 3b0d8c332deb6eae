"""Ranks that help each other: the plan, its price, counts. Values: test_fuzz.py."""

import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import on_ranks
from helpers.layers import make_layer, run, tokens_of

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import ExchangeRecord, build_groups, process_world
from fairseq_tutel.distributed.balance import (
    BalancePlan,
    break_even_rows,
    measured_break_even,
    plan_moves,
    plan_step,
)
from fairseq_tutel.moe import help_counts

SKEWS = ("uniform", "zipf", "one", "few", "empty")


def counts_of(rng, ranks, local, skew):
    experts, tokens = ranks * local, rng.choice([0, 1, 7, 100, 4096])
    weights = {
        "uniform": [1.0] * experts,
        "zipf": [1 / (place + 1) for place in rng.sample(range(experts), experts)],
        "one": [float(e == tokens % experts) for e in range(experts)],
        "few": [rng.choice([0, 0, 1]) + 1e-3 for _ in range(experts)],
        "empty": [1e-9 + (e < local) for e in range(experts)],
    }[skew]
    table = []
    for _ in range(ranks):
        chosen = rng.choices(range(experts), weights, k=tokens * rng.choice([0, 1, 1, 2]))
        table.append([chosen.count(e) for e in range(experts)])
    return table


def cases(number):
    rng = random.Random(number)
    for skew, ranks in itertools.product(SKEWS, (2, 3, 4, 8, 16)):
        yield counts_of(rng, ranks, rng.choice([1, 2, 4, 8]), skew)


def loads_after(rows_E, moves, ranks):
    local = len(rows_E) // ranks
    loads = [sum(rows_E[p * local : (p + 1) * local]) for p in range(ranks)]
    for move in moves:
        loads[move.home] -= move.end - move.begin
        loads[move.helper] += move.end - move.begin
    return loads


MOST = (101, 92, 60, 101)  # moves; as many experts must leave a rank, and at most 1.35 times that


@pytest.mark.parametrize("number", range(4))
def test_every_row_once_and_no_rank_above_the_tolerance(number):
    made = 0
    for table in cases(number):
        rows_E, ranks = [sum(column) for column in zip(*table, strict=True)], len(table)
        moves, mean = plan_moves(rows_E, ranks), sum(rows_E) / ranks
        assert moves == plan_moves(rows_E, ranks)  # nothing is drawn
        limit = max(math.ceil(mean), 1.05 * mean)
        assert max(loads_after(rows_E, moves, ranks)) <= limit
        for expert, parts in itertools.groupby(moves, key=lambda move: move.expert):
            end = None
            for move in parts:
                assert move.home == expert // (len(rows_E) // ranks) != move.helper
                assert 0 <= move.begin < move.end <= rows_E[expert] and end in (None, move.begin)
                end = move.end
            assert end == rows_E[expert]  # the home has the rest, from the first row on
        assert len({(move.expert, move.helper) for move in moves}) == len(moves)
        made += len(moves)
    assert made <= MOST[number]


@pytest.mark.parametrize("number", range(2))
def test_moves_pay_for_themselves(number):
    """With a price, each move carries as many rows, and the busiest rank gains what it pays."""
    hindered = 0
    for table in cases(number):
        rows_E, ranks = [sum(column) for column in zip(*table, strict=True)], len(table)
        moves = plan_step(torch.tensor(table), min_rows=300).moves
        before, after = max(loads_after(rows_E, (), ranks)), max(loads_after(rows_E, moves, ranks))
        homes = [move.home for move in moves]
        assert all(move.end - move.begin >= 300 for move in moves)
        assert after <= before - 300 * max(map(homes.count, homes), default=0)
        hindered += len(moves) < len(plan_moves(rows_E, ranks))
    assert hindered


def test_rows_that_start_to_travel_have_a_price():
    """Rank 0 is busy with its own 100 rows, or with 100 rows of rank 1."""
    own, others = torch.tensor([[90, 10, 0, 0], [0] * 4]), torch.tensor([[0] * 4, [90, 10, 0, 0]])
    for count_PE, link, helped_link in ((own, 0, 50), (others, 100, 50)):
        assert BalancePlan(count_PE).links_P2.max() == link
        plan = plan_step(count_PE, min_rows=10, travel=0.8)  # saves 50, and costs 10 + 0.8 * 50
        assert plan.load_P == [50, 50] and plan.links_P2.max() == helped_link
        assert bool(plan_step(count_PE, min_rows=10, travel=0.81).moves) == (link > 0)
        assert not plan_step(count_PE, min_rows=51).moves


@pytest.mark.parametrize("number", range(2))
def test_pieces_are_what_a_loop_over_rows_counts(number):
    for table in cases(number):
        count_PE = torch.tensor(table)
        ranks, experts = count_PE.shape
        if count_PE.sum() > 600:
            count_PE //= 100
        moves = plan_moves(count_PE.sum(0).tolist(), ranks)
        plan = BalancePlan(count_PE, moves)
        for rank in range(ranks):
            row_R, piece_R = plan.new_rows(rank) if moves else (None, None)
            pieces = []  # of the rows in their old order
            for expert in range(experts):
                home, parts = expert * ranks // experts, [m for m in moves if m.expert == expert]
                order = [(home + step) % ranks for step in range(ranks)]
                first = sum(int(count_PE[p, expert]) for p in order[: order.index(rank)])
                for position in range(first, first + int(count_PE[rank, expert])):
                    at = next((m.helper for m in parts if m.begin <= position < m.end), home)
                    found = range(*plan.edges_P[at : at + 2])
                    pieces += [v for v in found if plan.expert_V[v] == expert]
            want = torch.tensor(pieces).long().bincount(minlength=plan.count_PV.shape[1])
            assert want.tolist() == plan.count_PV[rank].tolist()
            if moves:  # rows of a piece follow each other
                assert piece_R.tolist() == pieces
                assert sorted(row_R.tolist()) == list(range(len(pieces)))
                by_new = piece_R[row_R.argsort()]
                assert by_new.tolist() == sorted(by_new.tolist())
            want[slice(*plan.edges_P[rank : rank + 2])] = 0
            assert plan.links_P2[rank, 0] == want.sum()
        assert plan.load_P == loads_after(count_PE.sum(0).tolist(), moves, ranks)
        assert plan.links_P2[:, 0].sum() == plan.links_P2[:, 1].sum()


def test_a_faster_link_pays_sooner():
    """Against the time of either side, computed from the sizes of an expert."""
    weights, flops, bandwidth = 2 * 512 * 2048, 500e9, 2e9
    for training, passes, ways in ((True, 6, 2), (False, 2, 1)):
        rows = break_even_rows(flops, bandwidth, 4, training=training)
        compute, travel = rows * passes * weights / flops, ways * 4 * weights / bandwidth
        assert travel <= compute < 1.02 * travel


@on_ranks(2)
def test_a_price_decides_whether_rows_are_moved_and_parts_may_be_frozen():
    """The measured price, the same on all ranks, or a given one, here too high."""
    rank, ranks = process_world()
    x, target, rows = tokens_of((40, 30))
    choices, groups, found = torch.tensor([[0, 1]] * len(x[rows])), build_groups(8), []
    for least in (0, 10**6, 1, None):
        help_each_other = {"balance_ranks": True, "balance_min_rows": least}
        exchange = ExchangeConfig(**({} if least is None else help_each_other))
        layer = make_layer(groups, exchange=exchange)
        _, aux = layer(x[rows], choices=choices, return_aux=True)
        moved = torch.tensor([aux.record.bytes_moved if aux.record else 0])
        dist.all_reduce(moved)
        assert least == 0 or (moved > 0) == (least == 1)
        layer.experts.fc1_weight.requires_grad_(False)
        layer.experts.fc2_bias.requires_grad_(False)
        found.append(run(layer, x[rows], target[rows], choices=choices))
    for name, value in found[-1].items():
        torch.testing.assert_close(found[2][name], value)
    device = torch.device("cpu")
    measured = [measured_break_even(groups, torch.float32, device, training=t) for t in (0, 1)]
    assert 1 <= measured[1] <= measured[0]
    table = [torch.tensor(measured) for _ in range(ranks)]
    dist.all_gather(table, table[rank])
    assert torch.equal(table[0], table[1])


def test_counts_of_help_are_sums_over_the_layers():
    one = ExchangeRecord(loads_P=[30, 10], rows_helped=7, bytes_moved=3_000_000)
    other = ExchangeRecord(loads_P=[20, 20], rows_helped=1)
    found = help_counts([one, ExchangeRecord(), other])
    names = ("moe_util_rank_helped", "moe_rows_helped", "moe_mb_moved", "moe_helped_layers")
    assert found == dict(zip(names, (100 * 20 / 30 + 100, 8, 3.0, 2), strict=True))
    assert help_counts([ExchangeRecord()]) == {}
