"""All-to-alls on 1, 2, 4 and 8 gloo ranks: what goes where; names, simulations, times."""

import logging
import time
import types

import pytest
import torch
from helpers.distributed import on_ranks

from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups, process_world
from fairseq_tutel.distributed.exchanges import (
    Direction,
    Exchange,
    ExchangeRecord,
    LocalCopy,
    Splits,
    stream_of,
)
from fairseq_tutel.distributed.world import even_nodes, ranks_per_node
from fairseq_tutel.moe import MoELayer


def splits_of(exchange, sent_P):
    """The splits where so many rows go to each rank, to its first expert. Collective."""
    count_Pe = torch.zeros(len(sent_P), exchange.groups.num_local_experts, dtype=torch.int64)
    count_Pe[:, 0] = torch.tensor(sent_P)
    [(_, splits)] = exchange.algorithm.share_chunks(count_Pe.flatten(), 1)
    return splits


_CODE = torch.tensor([100.0, 10.0, 1.0]).double()  # (rank, to, i) as one number


def _numbered(counts, order):
    """One row (rank, to, i) for each that goes to rank `to`, parts in the order of an exchange."""
    rank, _ = process_world()
    rows = [[rank, to, i] for to in order or range(len(counts)) for i in range(counts[to])]
    return torch.tensor(rows).double().view(-1, 3).requires_grad_()


# ranks -> (exchange, ranks per node)
EXCHANGED = {
    1: [("linear", 0)],
    2: [("linear", 0)],
    4: [("linear", 0), ("2dh", 2)],
    8: [("2dh", 2), ("2dh", 4)],
}


@pytest.mark.parametrize("world_size", EXCHANGED)
@on_ranks()
def test_exchanges_and_their_gradients(world_size):
    for name, local in EXCHANGED[world_size]:
        _exchange(name, local)


def _exchange(name, local):
    rank, size = process_world()
    exchange = build_exchange(ExchangeConfig(name, local), build_groups(2 * size))
    order = exchange.algorithm.send_order

    # equal parts; rank r sends 2r + to rows to rank `to`, none from 0 to 0; nothing but from 1 to 0
    tables = (
        [[3] * size] * size,
        [[2 * by + to for to in range(size)] for by in range(size)],
        [[5 * (by == 1) * (to == 0) for to in range(size)] for by in range(size)],
    )
    for number, send_table in enumerate(tables):
        send, receive = send_table[rank], [line[rank] for line in send_table]
        rows = _numbered(send, order)
        splits = splits_of(exchange, send) if number else None
        assert splits is None or list(splits.received_P) == receive
        got = exchange.dispatch(rows, splits)
        assert got.tolist() == [[by, rank, i] for by in range(size) for i in range(receive[by])]
        # the gradient of a row is what its receiver multiplies it by, whichever way it went
        (got * (got.detach() @ _CODE)[:, None]).sum().backward()
        assert rows.grad.tolist() == (rows.detach() @ _CODE)[:, None].expand(-1, 3).tolist()
        sent = got.detach().requires_grad_()
        back = exchange.combine(sent, splits)
        assert torch.equal(back, rows)
        (back * (rows.detach() @ _CODE)[:, None]).sum().backward()
        assert sent.grad.tolist() == (got.detach() @ _CODE)[:, None].expand(-1, 3).tolist()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
            narrow = rows.detach().to(dtype)
            moved = exchange.dispatch(narrow, splits)
            assert moved.dtype == dtype and torch.equal(moved, got.to(dtype))
            assert torch.equal(exchange.combine(moved, splits), narrow)

    count = torch.tensor([100 * rank + e for e in range(2 * size)], dtype=torch.int32)
    [(table, splits)] = exchange.algorithm.share_chunks(count, 1)
    assert table.tolist() == [[100 * by + 2 * rank, 100 * by + 2 * rank + 1] for by in range(size)]
    assert (splits is None) == (size == 1)
    if splits is not None:
        assert list(splits.sent_P) == [200 * rank + 4 * to + 1 for to in range(size)]
        assert list(splits.received_P) == [200 * by + 4 * rank + 1 for by in range(size)]


@pytest.mark.parametrize("name", list(EXCHANGES))
def test_simulated_exchange_copies_as_many_rows(name):
    exchange = build_exchange(name, build_groups(8, simulate_world_size=4))
    assert type(exchange.algorithm) is LocalCopy and exchange.name == name
    rows = torch.arange(24.0).view(12, 2).requires_grad_()
    splits = Splits([3] * 4, [3] * 4)
    for got in (exchange.dispatch(rows), exchange.combine(rows), exchange.dispatch(rows, splits)):
        assert torch.equal(got, rows) and got.data_ptr() != rows.data_ptr()
        # the gradient travels too, also one that takes no memory of its own
        for dy in (torch.randn(12, 2), torch.ones(()).expand(12, 2)):
            (d_rows,) = torch.autograd.grad(got, rows, dy, retain_graph=True)
            assert torch.equal(d_rows, dy) and d_rows.data_ptr() != dy.data_ptr()
            assert d_rows.is_contiguous()
    [(table, splits)] = exchange.algorithm.share_chunks(torch.arange(8), 1)
    assert table.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert splits.sent_P == splits.received_P == [1, 5, 9, 13]


@on_ranks(2)
def test_ranks_with_different_exchanges_are_named_and_exchanges_left_out():
    rank, _ = process_world()
    wires = [ExchangeConfig(wire=wire) for wire in ("same", "fp8")]
    for choices, words in (
        (["linear", "2dh"], r"algorithm: 2dh on ranks \[1\]; linear on ranks \[0\]$"),
        (wires, r"wire: fp8 on ranks \[1\]; same on ranks \[0\]$"),
    ):
        with pytest.raises(ValueError, match=f"^MoE ranks disagree on {words}"):
            MoELayer(8, 2, 8, groups=build_groups(2), exchange=choices[rank])
    for factor in (1.0, 0.0):  # left out, also on several ranks
        layer = MoELayer(6, 4, 8, skip_exchange=True, capacity_factor=factor)
        y = layer(x := torch.randn(12, 6, requires_grad=True))
        y.sum().backward()
        assert y.shape == x.shape and y.isfinite().all() and x.grad.isfinite().all()


def test_the_time_of_an_exchange_is_measured_without_its_gradient():
    slow = 0.02
    rows = torch.randn(4, 2, requires_grad=True)

    class Slow(LocalCopy):
        def move(self, rows, received, direction, splits):
            time.sleep(slow)
            super().move(rows, received, direction, splits)

    slowly = Slow(build_groups(4, simulate_world_size=4), "slow")
    timed, record = Exchange(slowly, timed=True), ExchangeRecord()
    there_and_back = timed.combine(timed.dispatch(rows, record=record), record=record)
    measured = record.cpu_ms
    assert measured >= 2000 * slow and record.cuda_ms == 0
    there_and_back.sum().backward()
    assert torch.equal(rows.grad, torch.ones(4, 2)) and record.cpu_ms == measured


def test_a_handle_is_waited_for_once_and_what_arrived_may_be_changed_in_place():
    exchange = build_exchange("linear", build_groups(4, simulate_world_size=4))
    rows = torch.randn(4, 6, requires_grad=True)
    for move in (exchange.dispatch, exchange.combine):
        (grad,) = torch.autograd.grad(move(rows).mul_(3).sum(), rows)
        assert torch.equal(grad, torch.full_like(grad, 3))
    handle = exchange.start(rows.detach(), Direction.DISPATCH, None, stream_of(rows.device))
    assert torch.equal(handle.wait(), rows)
    with pytest.raises(RuntimeError, match="the dispatch exchange was waited for before"):
        handle.wait()


# the hierarchical exchange


@pytest.mark.parametrize(
    "machines, local",
    [("aabb", 2), ("aaaa", 4), ("abcd", 1), ("aab", 0), ("abab", 0), ("aabbaa", 0), ("a", 1)],
)
def test_nodes_of_equal_size_with_neighbouring_ranks(machines, local):
    assert even_nodes(machines) == local


@on_ranks(4)
def test_where_it_does_not_fit():
    rank, world_size = process_world()
    assert ranks_per_node() == world_size  # one machine
    handler, lines = logging.Handler(), []
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fairseq_tutel").setLevel(logging.INFO)
    logging.getLogger("fairseq_tutel").addHandler(handler)
    groups = build_groups(4)
    for local, words in ((0, "on one node"), (1, "each node has one rank")):
        for _ in range(2):  # a second layer has nothing to log
            exchange = build_exchange(ExchangeConfig("2dh", local), groups)
            assert exchange.name == "linear"
        assert len(lines) == (rank == 0) and all(words in line for line in lines)
        lines.clear()
    # two ranks of an exchange on a node: nothing between nodes, though there are two
    assert build_exchange(ExchangeConfig("2dh", 2), build_groups(2)).name == "linear"
    with pytest.raises(ValueError, match="ranks_per_node=3: 4 ranks do not fill such nodes"):
        build_exchange(ExchangeConfig("2dh", 3), groups)
    with pytest.raises(ValueError) as caught:
        build_exchange(ExchangeConfig("2dh", 2 if rank else 4), groups)
    assert "ranks_per_node: 2 on ranks [1, 2, 3]; 4 on ranks [0]" in str(caught.value)


LINKS = types.SimpleNamespace(
    gpus_per_node=8, node_bandwidth=100e9, network_bandwidth=10e9, link_efficiency=0.5,
    memory_bandwidth=1e12, memory_efficiency=0.5, latency=10e-6, message_overhead=2e-6,
)  # fmt: skip


def test_predicted_times():
    """Bytes between nodes are the same, those inside a node many times as many, messages fewer."""
    size, ranks, nodes = 64e6, 64, 8
    linear = 10e-6 + size * (56 / 64) / (0.5 * 10e9) + 63 * 2e-6
    assert EXCHANGES.get("linear").predict(size, ranks, LINKS) == pytest.approx(linear)
    two = (
        2 * 10e-6 + size * (7 / 8) / (0.5 * 100e9) + size * (7 / nodes) / (0.5 * 10e9)
        + (8 + nodes - 2) * 2e-6 + 2 * size / (0.5 * 1e12)
    )  # fmt: skip
    assert EXCHANGES.get("2dh").predict(size, ranks, LINKS) == pytest.approx(two)
    assert two > linear
    predict = {name: EXCHANGES.get(name).predict for name in ("linear", "2dh")}
    for small in (1e3, 1e5):
        assert predict["2dh"](small, ranks, LINKS) < predict["linear"](small, ranks, LINKS)
    # nodes that are not filled, or one node
    for few in (4, 8, 12):
        assert predict["2dh"](size, few, LINKS) == predict["linear"](size, few, LINKS)
