"""The hierarchical exchange: nodes, its predicted time. What goes where: test_exchange.py."""

import logging
import types

import pytest
from helpers.distributed import on_ranks

from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups, process_world
from fairseq_tutel.distributed.world import even_nodes, ranks_per_node


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
