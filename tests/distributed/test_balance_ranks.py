"""Ranks that help each other give what one process gives, under any skew.

What cannot be balanced is refused by the cells of moe/test_product.py, too.
"""

import functools

import pytest
import torch
from helpers.distributed import on_ranks
from helpers.layers import make_layer, run, tokens_of

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import (
    ExchangeRecord,
    ExpertParallelGroups,
    build_groups,
    process_world,
)
from fairseq_tutel.distributed.balance import measured_break_even
from fairseq_tutel.moe import MoELayer, help_counts

SKEWS = ("uniform", "zipf", "one", "last", "own")


def balancing(**options):
    return ExchangeConfig(**{"balance_ranks": True, "balance_min_rows": 1, **options})


def choices_of(skew, tokens, experts, top_k, rank, ranks):
    weight_E = torch.ones(experts)
    if skew == "zipf":
        weight_E = 1 / (1 + (torch.arange(experts) * 7 % experts).float()) ** 2
    elif skew in ("one", "last"):
        weight_E = torch.full((experts,), 1e-9)
        weight_E[0 if skew == "one" else -1] = 1
    elif skew == "own":  # rank 0 is busy with its own tokens
        weight_E[rank * experts // ranks :] = 1e-9
    torch.manual_seed(tokens + rank)
    return torch.multinomial(weight_E.expand(max(tokens, 1), -1), top_k)[:tokens]


def skewed(skew, sizes, experts, top_k=2):
    _, ranks = process_world()
    parts = [choices_of(skew, n, experts, top_k, p, ranks) for p, n in enumerate(sizes)]
    return torch.cat(parts)


def _as_one_process(experts, group_size, degree):
    _, world_size = process_world()
    sizes = (40, 0, 30, 50)[:world_size]
    x, target, rows = tokens_of(sizes)
    groups = build_groups(experts, expert_parallel_size=group_size)
    layer = make_layer(groups, exchange=balancing(overlap_degree=degree))
    helped = 0
    for skew in SKEWS:
        choices = skewed(skew, sizes, experts, top_k=2 if experts > 2 else 1)
        # gradients of experts: test_fuzz.py, moe/test_product.py
        want = run(make_layer(ExpertParallelGroups(experts)), x, target, choices=choices)
        found = run(layer, x[rows], target[rows], choices=choices[rows])
        for name in ("y", "x"):
            torch.testing.assert_close(found[name], want[name][rows], rtol=0, atol=1e-12)
        again = run(layer, x[rows], target[rows], False, choices=choices[rows])
        assert all(torch.equal(value, again[name]) for name, value in found.items())
        with torch.no_grad():
            y, aux = layer(x[rows], choices=choices[rows], return_aux=True)
        torch.testing.assert_close(y, want["y"][rows], rtol=0, atol=1e-12)
        load = torch.tensor(aux.record.loads_P).double()
        assert load.max() <= max(1.05 * load.mean(), load.mean().ceil())
        counts = torch.tensor([aux.record.rows_helped, aux.record.bytes_moved])
        torch.distributed.all_reduce(counts)
        helped += int((counts > 0).all())
    assert helped >= 3


@on_ranks(4)
def test_as_one_process():
    for experts, group_size, degree in ((8, 0, 2), (2, 0, 1), (6, 2, 1)):
        _as_one_process(experts, group_size, degree)


@on_ranks(2)
def test_a_price_decides_whether_rows_are_moved_and_parts_may_be_frozen():
    """The measured price, the same on all ranks, or a given one, here too high."""
    rank, ranks = process_world()
    sizes = (40, 30)
    x, target, rows = tokens_of(sizes)
    choices, groups = skewed("one", sizes, 8)[rows], build_groups(8)
    for least in (0, 10**6, 1):
        layer = make_layer(groups, exchange=balancing(balance_min_rows=least))
        _, aux = layer(x[rows], choices=choices, return_aux=True)
        moved = torch.tensor([aux.record.bytes_moved])
        torch.distributed.all_reduce(moved)
        assert least == 0 or (moved > 0) == (least == 1)
    plain = make_layer(groups)
    for each in (layer, plain):
        each.experts.fc1_weight.requires_grad_(False)
        each.experts.fc2_bias.requires_grad_(False)
    got, want = (run(each, x[rows], target[rows], choices=choices) for each in (layer, plain))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)
    device = torch.device("cpu")
    measured = [measured_break_even(groups, torch.float32, device, training=t) for t in (0, 1)]
    assert 1 <= measured[1] <= measured[0]
    table = [torch.tensor(measured) for _ in range(ranks)]
    torch.distributed.all_gather(table, table[rank])
    assert torch.equal(table[0], table[1])


def test_what_cannot_be_balanced_is_refused():
    groups = build_groups(8, simulate_world_size=4)
    make = functools.partial(MoELayer, 8, 8, groups=groups, exchange=balancing())
    with pytest.raises(ValueError, match="capacity_factor=2.0"):
        make(capacity_factor=0)(torch.zeros(2, 8), capacity_factor=2.0)
    sliced = build_groups(2, simulate_world_size=4, placement="sliced")
    with pytest.raises(ValueError, match="placement='sliced'"):
        MoELayer(8, 2, groups=sliced, exchange=balancing(), capacity_factor=0)
    with pytest.raises(ValueError, match="algorithm='linear', not '2dh'"):
        balancing(algorithm="2dh")


def test_counts_of_help_are_sums_over_the_layers():
    one = ExchangeRecord(loads_P=[30, 10], rows_helped=7, bytes_moved=3_000_000)
    other = ExchangeRecord(loads_P=[20, 20], rows_helped=1)
    found = help_counts([one, ExchangeRecord(), other])
    names = ("moe_util_rank_helped", "moe_rows_helped", "moe_mb_moved", "moe_helped_layers")
    assert found == dict(zip(names, (100 * 20 / 30 + 100, 8, 3.0, 2), strict=True))
    assert help_counts([ExchangeRecord()]) == {}
