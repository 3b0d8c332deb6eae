"""The hierarchical exchange in a layer, bit for bit the linear one; nodes; the choice between both.

What rows it moves where, forth, back and with gradients, is tested with the other exchanges.
"""

import logging
import math
import types

import pytest
import torch
from helpers.distributed import run_ranks

from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups, process_world
from fairseq_tutel.distributed.exchanges import auto
from fairseq_tutel.distributed.nodes import even_nodes, ranks_per_node, this_machine
from fairseq_tutel.moe import MoELayer

M = 6
# capacity factors of the padded and the ragged layouts; evaluation with nothing dropped
FACTORS = {
    "padded": (1.0, True),
    "ragged": (0.0, True),
    "bounded": (-0.5, True),
    "evaluation": (1.0, False),
}
# ranks -> (experts, ranks per node): E > W, E = W, E < W
CASES = {4: [(8, 2), (4, 2)], 8: [(16, 2), (8, 4), (4, 2)]}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _run(name, experts, local, layout, dtype):
    rank, _ = process_world()
    factor, training = FACTORS[layout]
    torch.manual_seed(7)
    layer = MoELayer(
        M,
        experts,
        8,
        groups=build_groups(experts),
        exchange=ExchangeConfig(name, local),
        seed=3,
        capacity_factor=factor,
    )
    layer = layer.to(dtype).train(training)
    assert layer.exchange.name == name
    torch.manual_seed(rank)
    # rank 1 has no tokens
    x = torch.randn([9, 0, 14, 1, 5, 8, 3, 11][rank], M).to(dtype).requires_grad_()
    y, aux = layer(x, return_aux=True)
    (y.float().square().sum() + aux.loss).backward()
    return [y.detach(), x.grad, *(param.grad for param in layer.parameters())]


def _switch():
    """One layer whose exchange changes from call to call; gradients add up over the calls."""
    rank, world_size = process_world()
    choices = [ExchangeConfig(name, 2, degree) for name in ("linear", "2dh") for degree in (1, 2)]
    torch.manual_seed(rank)
    xs = torch.randn(4, 5 + rank, M)
    layers = [
        MoELayer(M, 2 * world_size, 8, groups=build_groups(2 * world_size), exchange=each, seed=3)
        for each in choices
    ]
    layers[0].prepare_exchanges(choices)
    # the gate is drawn from the generator of each rank
    torch.nn.init.normal_(layers[0].gate.wg.weight, generator=torch.Generator().manual_seed(1))
    want = {}
    for layer, x in zip(layers, xs, strict=True):
        layer.load_state_dict(layers[0].state_dict())
        y = layer(x)
        y.square().sum().backward()
        for name, param in layer.named_parameters():
            want[name] = want.get(name, 0) + param.grad
            param.grad = None
        assert torch.equal(layers[0](x, exchange=layer.exchange_config), y)
    assert layers[0].exchange_config == choices[0]
    for each, x in zip(choices, xs, strict=True):
        layers[0](x, exchange=each).square().sum().backward()
    for name, param in layers[0].named_parameters():
        assert torch.equal(param.grad, want[name]), name


def _compare():
    rank, world_size = process_world()
    _switch()
    for experts, local in CASES[world_size]:
        for layout in FACTORS:
            for dtype in DTYPES:
                case = (experts, local, layout, dtype)
                ours, linear = (_run(name, *case) for name in ("2dh", "linear"))
                assert all(torch.equal(a, b) for a, b in zip(ours, linear, strict=True)), case
                assert rank == 1 or ours[1].abs().sum() > 0


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_layer_is_the_same_bit_for_bit(world_size):
    run_ranks(_compare, world_size, timeout=200)


@pytest.mark.parametrize(
    "machines, local",
    [("aabb", 2), ("aaaa", 4), ("abcd", 1), ("aab", 0), ("abab", 0), ("aabbaa", 0), ("a", 1)],
)
def test_nodes_of_equal_size_with_neighbouring_ranks(machines, local):
    assert even_nodes(machines) == local


def _fall_back():
    rank, world_size = process_world()
    assert ranks_per_node() == world_size  # one machine
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("fairseq_tutel")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    groups = build_groups(4)
    for local, words in ((0, "on one node"), (1, "each node has one rank")):
        for _ in range(2):  # a second layer has nothing to log
            exchange = build_exchange(ExchangeConfig("2dh", local), groups)
            assert exchange.name == "linear"
        assert len(lines) == (rank == 0) and all(words in line for line in lines)
        lines.clear()
    # two ranks of an exchange on a node: nothing between nodes, though there are two
    assert build_exchange(ExchangeConfig("auto", 2), build_groups(2)).name == "linear"
    with pytest.raises(ValueError, match="ranks_per_node=3: 4 ranks do not fill such nodes"):
        build_exchange(ExchangeConfig("2dh", 3), groups)
    with pytest.raises(ValueError) as caught:
        build_exchange(ExchangeConfig("2dh", 2 if rank else 4), groups)
    assert "ranks_per_node: 2 on ranks [1, 2, 3]; 4 on ranks [0]" in str(caught.value)

    # auto: measured once, the same on all ranks; what it chooses follows from what it measured
    lines.clear()
    config = ExchangeConfig("auto", ranks_per_node=2)
    chosen = build_exchange(config, groups)
    assert build_exchange(config, groups) is chosen
    assert len(lines) == (rank == 0) and all("2 nodes of 2 ranks" in line for line in lines)
    measured = {name: list(seconds) for name, seconds in chosen.seconds.items()}
    assert all(seconds > 0 for line in measured.values() for seconds in line)
    chosen.seconds = {"linear": [10.0, 20, 30, 40, 50, 60], "2dh": [5.0, 15, 35, 50, 60, 70]}
    sizes = auto._PROBES
    names = [chosen.for_message(size).name for size in (1, *sizes, 100 * sizes[-1])]
    assert names == [*["2dh"] * 3, *["linear"] * 5]
    layer = MoELayer(M, 4, 8, groups=groups, exchange=config)
    assert layer.exchange is chosen and layer(torch.randn(5, M)).shape == (5, M)
    return measured


def test_where_it_does_not_fit_and_which_one_auto_takes():
    measured = run_ranks(_fall_back, 4)
    assert all(found == measured[0] for found in measured)


def test_this_machine_is_one_number():
    assert this_machine() == this_machine() < 2**63


def test_times_between_measured_sizes_lie_on_straight_lines():
    sizes, seconds = [10, 20, 40], [1.0, 2.0, 8.0]
    found = [auto.interpolate(sizes, seconds, size) for size in (5, 10, 15, 20, 30, 40, 50)]
    assert found == pytest.approx([0.5, 1, 1.5, 2, 5, 8, 11])


def test_one_size_that_was_measured_badly_has_no_say():
    ones = [1.0] * 6
    assert auto.crossover(ones, [0.5, 0.6, 0.7, 1.2, 1.5, 2.0]) == 3
    assert auto.crossover(ones, [0.5, 0.6, 1.1, 0.7, 1.5, 2.0]) == 4
    assert auto.crossover(ones, [1.1, 1.1, 0.93, 1.2, 1.3, 1.5]) == 0
    assert auto.crossover(ones, [0.5] * 6) == 6
    assert auto.crossover(ones, [0.98] * 6) == 0  # not by as much as the margin


def test_measuring_goes_on_until_it_is_clear():
    assert not auto.enough([(1.0, 2.0)] * 8) and auto.enough([(1.0, 2.0)] * 9)
    noisy = [(1.0, 1.0 + 0.3 * math.sin(37 * i)) for i in range(60)]
    assert not auto.enough(noisy[:20]) and auto.enough(noisy[: auto._MOST])
    assert auto.enough([(1.0, 1.6 + 0.3 * math.sin(37 * i)) for i in range(10)])
    # what hits both alike does not hide which one is faster
    assert auto.enough([((1 + i % 5), 0.9 * (1 + i % 5)) for i in range(10)])


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
    predict = {name: EXCHANGES.get(name).predict for name in ("linear", "2dh", "auto")}
    for small in (1e3, 1e5):
        assert predict["2dh"](small, ranks, LINKS) < predict["linear"](small, ranks, LINKS)
    for each in (1e3, 64e6):
        both = [predict[name](each, ranks, LINKS) for name in ("linear", "2dh")]
        assert predict["auto"](each, ranks, LINKS) == min(both)
    # nodes that are not filled, or one node
    for few in (4, 8, 12):
        assert predict["2dh"](size, few, LINKS) == predict["linear"](size, few, LINKS)
