"""Exchange and experts in chunks that overlap: order, modes, errors. Values: test_fuzz.py"""

import copy
import functools
import itertools
import time

import pytest
import torch
from helpers.assertions import assert_tensors_close, rms_ratio
from helpers.distributed import on_ranks, run_ranks
from helpers.layers import HIDDEN, LAYOUTS, M, make_layer, run, tokens_of
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import (
    ExpertParallelGroups,
    build_groups,
    gather_texts,
    process_world,
)
from fairseq_tutel.distributed.exchanges import Direction, Exchange
from fairseq_tutel.moe import MoELayer, call_plan


def use_move(layer, move):
    """Let ``move(that of the layer's algorithm, *arguments)`` move its rows."""
    before = layer.exchange_choice
    algorithm = copy.copy(before.exchange.algorithm)
    algorithm.move = functools.partial(move, algorithm.move)
    exchange = Exchange(algorithm, before.exchange.codec, before.exchange.timed)
    layer.exchange_choice = before._replace(exchange=exchange)


def failing(direction):
    def move(own, rows, received, towards, splits):
        if towards is direction:
            raise ValueError("the link is down")
        own(rows, received, towards, splits)

    return move


def recording(log):
    """Write down the order of directions; nobody is in step by chance."""
    rank, _ = process_world()

    def move(own, rows, received, direction, splits):
        received.fill_(torch.nan)
        time.sleep(0.002 * ((len(log) + rank) % 3))
        sizes = len(rows) + len(received) if splits is None else ""
        log.append(f"{direction.value} {sizes}")
        own(rows, received, direction, splits)

    return move


@on_ranks(4, timeout=250)
def test_collectives_have_one_order():
    """One order on all ranks, also where one has no tokens. Values: test_fuzz.py."""
    x, target, rows = tokens_of()
    for (own, factor), name in zip(((False, 1.0), (True, -0.5)), ("linear", "2dh"), strict=True):
        config, log = ExchangeConfig(name, 2, overlap_degree=4), []
        layer = make_layer(build_groups(8), own=own, exchange=config, capacity_factor=factor)
        use_move(layer, recording(log))
        given = x[rows].clone().requires_grad_()
        # used twice in one pass, and two passes before the gradients are looked at
        for _ in range(2):
            y = layer(layer(given) + given)
            (y * target[rows]).sum().backward()
        directions = [line.rsplit(" ", 1)[0] for line in log]
        forward = [direction for direction in ("dispatch", "combine") for _ in range(4)]
        backward = [f"{direction} gradient" for direction in forward[::-1]]
        assert directions == 2 * (2 * forward + 2 * backward)
        assert len(set(gather_texts("; ".join(log)))) == 1
        if factor > 0:  # sizes are those of all ranks: the backward pass mirrors the forward one
            mirrored = [line.replace(" gradient", "") for line in log[31:15:-1]]
            assert mirrored == log[:16]
    # memory that rows have not arrived in is NaN
    assert given.grad.isfinite().all() and y.isfinite().all()


# in one process, which plays a rank of four: copies take the place of messages


def simulated(degree, own=False, **options):
    torch.manual_seed(0)
    groups = build_groups(8, simulate_world_size=4)
    config = ExchangeConfig(overlap_degree=degree)
    layer = make_layer(groups, "padded", own=own, exchange=config, **options)
    return layer, torch.randn(32, M, dtype=torch.float64, requires_grad=True)


class WritingStream:
    """Writes down when work is queued and when it is waited for."""

    def __init__(self):
        self.log = []
        self.numbers = itertools.count()

    def submit(self, work):
        number = next(self.numbers)
        self.log.append(f">{number}")
        work()
        return lambda: self.log.append(f".{number}")


def test_schedule_is_that_of_the_docstring(monkeypatch):
    stream = WritingStream()
    monkeypatch.setattr(call_plan, "stream_of", lambda device: stream)

    def noted(name, word):
        function = getattr(ops, name)

        def call(*args, **kwargs):
            stream.log.append(word)
            return function(*args, **kwargs)

        monkeypatch.setattr(ops, name, call)

    noted("network_fwd", "F")
    noted("network_bwd", "B")
    noted("network_bwd_params", "W")
    layer, x = simulated(4)
    y = layer(x)
    assert " ".join(stream.log) == ">0 >1 >2 >3 .0 F >4 .1 F >5 .2 F >6 .3 F >7 .4 .5 .6 .7"
    stream.log.clear()
    y.sum().backward()
    assert " ".join(stream.log) == (
        ">8 >9 >10 >11 .8 B >12 .9 B >13 .10 B >14 .11 B >15 W .12 .13 .14 .15"
    )


def test_experts_whose_forward_is_replaced_are_called():
    """As fairseq's checkpoint_wrapper does; hooks: test_product.py."""
    layer, x = simulated(4)
    want, calls, forward = layer(x), [], layer.experts.forward
    layer.experts.forward = lambda *args: calls.append("replaced") or forward(*args)
    torch.testing.assert_close(layer(x), want)
    assert len(calls) == 4


def test_times_are_taken_without_overlap():
    layer, x = simulated(4, record_exchange_time=True)
    _, aux = layer(x, return_aux=True)
    assert aux.metrics_dict()["all_to_all_cpu_time_ms"] == pytest.approx(aux.record.cpu_ms)
    assert aux.record.cpu_ms > 0 and layer.exchange_config.overlap_degree == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_stream_gives_the_same(layout, own, dtype, most, device="cuda"):
    """Copies take the place of messages; memory is given back and taken again between the runs."""
    groups, results = build_groups(8, simulate_world_size=4), []
    x, target = torch.randn(2, 4096, M, device=device, dtype=dtype)
    for degree in (1, 4, 4, 8):
        config = ExchangeConfig(overlap_degree=degree)
        layer = make_layer(groups, layout, dtype, own, exchange=config).to(device)
        results.append(run(layer, x, target))
        assert_tensors_close(results[-1], results[0], most)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("direction", list(Direction))
def test_an_error_in_the_stream_reaches_the_user(direction, own):
    layer, x = simulated(4, own)
    works = layer.exchange_choice
    use_move(layer, failing(direction))
    with pytest.raises(ValueError, match="the link is down"):
        layer(x).sum().backward()
    layer.exchange_choice = works
    layer(x).sum().backward()


FAILING = [  # which call of the experts fails, and what had been sent by then
    ("network_fwd", 1, 5), ("network_bwd", 2, 14), ("network_bwd_params", 0, 16),
    ("forward", 1, 5),  # of experts of one's own
]  # fmt: skip


@pytest.mark.parametrize("name, number, sent", FAILING)
def test_an_error_of_the_experts_comes_after_what_is_under_way(name, number, sent, monkeypatch):
    layer, x = simulated(4, own=name == "forward")
    moved = []

    def move(own, *arguments):
        time.sleep(0.02)  # the last arrive long after the first
        own(*arguments)
        moved.append(arguments)

    use_move(layer, move)
    where, calls = layer.experts if name == "forward" else ops, itertools.count()
    function = getattr(where, name)

    def failing(*args, **kwargs):
        if next(calls) == number:
            raise ValueError("out of memory")
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing)
        with pytest.raises(ValueError, match="out of memory"):
            layer(x).sum().backward()
        assert len(moved) == sent
    layer(x).sum().backward()


# On one GPU, where the backward pass has its own thread, an early exchange meets the wrong partner.


SIZES = (17, 9)  # tokens of the two ranks


def train(groups, device, mine):
    """Two steps of a residual stack, its layers recomputed; [output, dx, gate gradients, loads]."""
    torch.manual_seed(3)
    layers = [
        MoELayer(M, 4, HIDDEN, capacity_factor=factor, groups=groups, seed=seed).to(device)
        for seed, factor in enumerate((8.0, 0.0, 8.0, 0.0))
    ]
    x, target = (part[mine].to(device) for part in torch.randn(2, sum(SIZES), M))
    x, loads = x.requires_grad_(), []

    def run(layer, h):
        y, aux = layer(h, return_aux=True)
        loads.append(aux.load_E)
        return h + y

    for _ in range(2):
        h = x
        for number, layer in enumerate(layers):
            # every other layer again in the backward pass
            h = checkpoint(run, layer, h, use_reentrant=False) if number % 2 else run(layer, h)
        (h * target).sum().backward()
    gates = torch.stack([layer.gate.wg.weight.grad for layer in layers])
    return [t.detach().cpu() for t in (h, x.grad, gates, torch.stack(loads[: len(layers)]))]


def _on_ranks(device):
    rank, _ = process_world()
    mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    return train(build_groups(4), device, mine)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_on_one_device_equal_one_rank(device):
    want = train(ExpertParallelGroups(4), "cpu", slice(None))
    parts = run_ranks(_on_ranks, 2, device, timeout=90)
    y, dx, gates, loads = zip(*parts, strict=True)
    found = torch.cat(y), torch.cat(dx), sum(gates), sum(loads)
    assert all(rms_ratio(*pair) < 1e-5 for pair in zip(found, want, strict=True))
