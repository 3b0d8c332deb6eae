"""All-to-all and the whole dispatch-combine round trip on 1, 2 and 4 gloo ranks."""

import functools
import time

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.routing import route

from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed import (
    ExpertParallelGroups,
    LocalCopy,
    TimedExchange,
    build_exchange,
    build_groups,
    process_world,
    register_exchange,
    sync_step,
)
from fairseq_tutel.moe import MoEConfig, MoELayer, dispatch_and_combine

# capacity factor of the padded and of the ragged layouts
LAYOUTS = {"padded": 1.0, "padded, nothing dropped": 8.0, "ragged": 0.0, "ragged, bounded": -0.5}
WORLDS = {1: (1, 4), 2: (1, 2, 4), 4: (2, 4, 8)}  # ranks -> experts: fewer, equal, more
M = 5
_CODE = torch.tensor([100.0, 10.0, 1.0]).double()  # (rank, to, i) as one number


def _tokens(rank):
    """Different on every rank; rank 1 has none."""
    return [9, 0, 14, 1][rank]


def _numbered(counts, order):
    """One row (rank, to, i) for each that goes to rank `to`, parts in the order of an exchange."""
    rank, _ = process_world()
    rows = [[rank, to, i] for to in order or range(len(counts)) for i in range(counts[to])]
    return torch.tensor(rows).double().view(-1, 3).requires_grad_()


def _exchanges(name, ranks_per_node):
    rank, size = process_world()
    exchange = build_exchange(ExchangeConfig(name, ranks_per_node), build_groups(2 * size))
    assert exchange.name == (name if size > 1 else "none")
    order = exchange.send_order

    # equal parts: rows say where they come from and where they go
    rows = _numbered([3] * size, order)
    got = exchange.forth(rows)
    assert got.tolist() == [[by, rank, i] for by in range(size) for i in range(3)]
    back = exchange.back(got.detach().requires_grad_())
    assert torch.equal(back, rows)
    # the gradient of a row is what its receiver multiplies it by, whichever way it went
    (got * (got.detach() @ _CODE)[:, None]).sum().backward()
    assert rows.grad.tolist() == (rows.detach() @ _CODE)[:, None].expand(-1, 3).tolist()
    sent = got.detach().requires_grad_()
    (exchange.back(sent) * (rows.detach() @ _CODE)[:, None]).sum().backward()
    assert sent.grad.tolist() == (got.detach() @ _CODE)[:, None].expand(-1, 3).tolist()

    # rank r sends 2r + to rows to rank `to`, none from 0 to 0; or nothing but from rank 1 to 0
    for send_table in (
        [[2 * by + to for to in range(size)] for by in range(size)],
        [[5 * (by == 1) * (to == 0) for to in range(size)] for by in range(size)],
    ):
        send, receive = send_table[rank], [line[rank] for line in send_table]
        rows = _numbered(send, order)
        parts = exchange.parts(send, receive)
        got = exchange.forth(rows, parts)
        assert got.tolist() == [[by, rank, i] for by in range(size) for i in range(receive[by])]
        (got * (got.detach() @ _CODE)[:, None]).sum().backward()
        assert rows.grad.tolist() == (rows.detach() @ _CODE)[:, None].expand(-1, 3).tolist()
        sent = got.detach().requires_grad_()
        back = exchange.back(sent, parts)
        assert torch.equal(back, rows)
        (back * (rows.detach() @ _CODE)[:, None]).sum().backward()
        assert sent.grad.tolist() == (got.detach() @ _CODE)[:, None].expand(-1, 3).tolist()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
            narrow = rows.detach().to(dtype)
            moved = exchange.forth(narrow, parts)
            assert moved.dtype == dtype and torch.equal(moved, got.to(dtype))
            assert torch.equal(exchange.back(moved, parts), narrow)

    count = torch.tensor([100 * rank + e for e in range(2 * size)], dtype=torch.int32)
    table, parts = exchange.share_counts(count)
    assert table.tolist() == [[100 * by + 2 * rank, 100 * by + 2 * rank + 1] for by in range(size)]
    if size == 1:
        assert parts is None
    else:
        assert list(parts.sent_W) == [200 * rank + 4 * to + 1 for to in range(size)]
        assert list(parts.received_W) == [200 * by + 4 * rank + 1 for by in range(size)]


# ranks -> ranks per node of the exchanges that tell nodes apart
NODES = {1: (0,), 2: (0,), 4: (2,), 8: (2, 4)}
NAMES = [name for name in EXCHANGES if name != "auto"]  # which is one of the others


@pytest.mark.parametrize(
    "world_size, ranks_per_node, name",
    [
        pytest.param(world, local, name, marks=[pytest.mark.slow] * (world == 8))
        for world, nodes in NODES.items()
        for local in nodes
        for name in NAMES
        if local or not EXCHANGES.get(name).needs_nodes
    ],
)
def test_exchanges_and_their_gradients(world_size, ranks_per_node, name):
    run_ranks(_exchanges, world_size, name, ranks_per_node)


def _round_trips():
    """Experts that give back what they get: the layer is the sum of the weights that were kept."""
    rank, world_size = process_world()
    errors = {}
    for num_experts in WORLDS[world_size]:
        groups = build_groups(num_experts)
        for layout, factor in LAYOUTS.items():
            top_k = min(2, num_experts)
            config = MoEConfig(
                num_experts=num_experts,
                top_k=top_k,
                capacity_factor=factor,
                normalize_before_dropping=True,
                second_expert_policy="all",
            )
            torch.manual_seed(rank)
            x = torch.randn(_tokens(rank), M, dtype=torch.float64, requires_grad=True)
            logits = torch.randn(len(x), num_experts, dtype=torch.float64)
            logits[:, 0] += 4  # a favourite, so that some tokens are dropped
            logits.requires_grad_()
            step = sync_step(len(x), None, groups)
            routing, _ = route(logits, config, training=True, num_tokens=step.num_tokens)
            assert routing.padded == (factor > 0)
            exchange = build_exchange("linear", groups)
            y = dispatch_and_combine(x, routing, lambda batch: batch.rows, exchange)
            target = torch.randn_like(x)
            (y * target).sum().backward()
            other_x = x.detach().clone().requires_grad_()
            other_logits = logits.detach().clone().requires_grad_()
            routing, _ = route(other_logits, config, training=True, num_tokens=step.num_tokens)
            want = other_x * routing.topk_weight_TK.sum(1, keepdim=True)
            (want * target).sum().backward()
            pairs = {
                "y": (y, want),
                "x": (x.grad, other_x.grad),
                "logits": (logits.grad, other_logits.grad),
            }
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


@pytest.mark.parametrize("name", list(EXCHANGES))
def test_simulated_exchange_copies_as_many_rows(name):
    exchange = build_exchange(name, build_groups(8, simulate_world_size=4))
    assert not exchange.communicates
    rows = torch.arange(24.0).view(12, 2).requires_grad_()
    parts = exchange.parts([3] * 4, [3] * 4)
    for got in (exchange.forth(rows), exchange.back(rows), exchange.forth(rows, parts)):
        assert torch.equal(got, rows) and got.data_ptr() != rows.data_ptr()
        # the gradient travels too, also one that takes no memory of its own
        for dy in (torch.randn(12, 2), torch.ones(()).expand(12, 2)):
            (d_rows,) = torch.autograd.grad(got, rows, dy, retain_graph=True)
            assert torch.equal(d_rows, dy) and d_rows.data_ptr() != dy.data_ptr()
            assert d_rows.is_contiguous()
    table, parts = exchange.share_counts(torch.arange(8))
    assert table.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts.sent_W == parts.received_W == [1, 5, 9, 13]


def test_one_rank_does_not_copy():
    rows = torch.randn(3, 2)
    exchange = build_exchange("linear", ExpertParallelGroups(4))
    assert exchange.forth(rows) is rows and exchange.back(rows) is rows


def test_unknown_and_taken_names_are_refused():
    with pytest.raises(ValueError, match="'quick' is unknown; choose one of 2dh, auto, linear"):
        MoELayer(8, 2, exchange="quick")
    with pytest.raises(ValueError, match="'linear' is registered already"):
        register_exchange("linear")(LocalCopy)


def _choose_differently():
    rank, _ = process_world()
    groups = build_groups(2)
    with pytest.raises(ValueError) as caught:
        MoELayer(8, 2, groups=groups, exchange="pairwise" if rank else "linear")
    return str(caught.value)


def test_ranks_with_different_exchanges_are_named():
    for message in run_ranks(_choose_differently, 2):
        assert message == (
            "MoE ranks disagree on the exchange: linear on ranks [0]; pairwise on ranks [1]"
        )


def test_the_time_of_an_exchange_is_measured_without_its_gradient():
    slow = 0.02
    rows = torch.randn(4, 2, requires_grad=True)

    class Slow(LocalCopy):
        def move(self, rows, received, leg, parts):
            time.sleep(slow)
            super().move(rows, received, leg, parts)

    timed = TimedExchange(Slow(build_exchange("linear", build_groups(4, simulate_world_size=4))))
    timed.back(timed.forth(rows)).sum().backward()
    assert torch.equal(rows.grad, torch.ones(4, 2))
    assert 2 * slow <= timed.cpu_ms / 1000 < 3.5 * slow and timed.cuda_ms == 0
