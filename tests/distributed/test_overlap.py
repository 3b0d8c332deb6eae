"""Exchange and experts in chunks that overlap: order, modes, errors. Values: test_fuzz.py"""

import copy
import functools
import itertools
import time

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import on_ranks
from helpers.layers import HIDDEN, LAYOUTS, M, make_layer, run, tokens_of
from torch import nn

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, gather_texts, process_world
from fairseq_tutel.distributed.exchanges import Direction, Exchange
from fairseq_tutel.distributed.exchanges import exchange as exchange_module
from fairseq_tutel.moe import MoELayer, call_plan


def use_move(layer, move):
    """Let ``move(that of the layer's algorithm, *arguments)`` move its rows.

    Returns:
        The layer's choice before.
    """
    before = layer.exchange_choice
    algorithm = copy.copy(before.exchange.algorithm)
    algorithm.move = functools.partial(move, algorithm.move)
    exchange = Exchange(algorithm, before.exchange.codec, before.exchange.timed)
    layer.exchange_choice = before._replace(exchange=exchange)
    return before


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
    """One order on all ranks, also where one has no tokens; drops as without overlap."""
    buffer = exchange_module._buffer
    # memory that rows have not arrived in is NaN
    exchange_module._buffer = lambda *args: buffer(*args).fill_(torch.nan)
    x, target, rows = tokens_of()
    for own, factor, name in itertools.product((False, True), (1.0, -0.5), ("linear", "2dh")):
        logs = {}
        for degree in (1, 4):
            config = ExchangeConfig(name, 2, degree)
            layer = make_layer(build_groups(8), own=own, exchange=config, capacity_factor=factor)
            log = []
            use_move(layer, recording(log))
            given = x[rows].clone().requires_grad_()
            # used twice in one pass, and two passes before the gradients are looked at
            for _ in range(2):
                y, aux = layer(given, return_aux=True)
                y = layer(y + given)
                (y * target[rows]).sum().backward()
            grads = [p.grad for p in layer.parameters()]
            logs[degree] = log, [y.detach(), given.grad, *grads], aux
        (_, want, want_aux), (log, got, aux) = logs[1], logs[4]
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        assert torch.equal(aux.num_kept_per_expert_E, want_aux.num_kept_per_expert_E)
        directions = [line.rsplit(" ", 1)[0] for line in log]
        forward = [direction for direction in ("dispatch", "combine") for _ in range(4)]
        backward = [f"{direction} gradient" for direction in forward[::-1]]
        assert directions == 2 * (2 * forward + 2 * backward)
        assert len(set(gather_texts("; ".join(log)))) == 1
        if factor > 0:  # sizes are those of all ranks: the backward pass mirrors the forward one
            mirrored = [line.replace(" gradient", "") for line in log[31:15:-1]]
            assert mirrored == log[:16]


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
    # frozen experts have no weight gradients, frozen tokens nobody to send theirs to
    for frozen, missing in (("experts", "W"), ("x", ">15")):
        layer.requires_grad_(True)
        if frozen == "experts":
            layer.experts.requires_grad_(False)
        stream.numbers = itertools.count()
        y = layer(x if frozen == "experts" else x.detach())
        stream.log.clear()
        y.sum().backward()
        assert missing not in stream.log and ">11" in stream.log


@pytest.mark.parametrize("own", [False, True])
def test_modes_of_the_caller(own):
    """Modes are settings of each thread, and the stream has its own."""
    layer, x = simulated(4, own)
    want = layer(x)
    want.sum().backward()
    gradient, x.grad = x.grad, None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(layer(x), want)
    with torch.autograd.set_detect_anomaly(True):
        layer(x).sum().backward()
    torch.testing.assert_close(x.grad, gradient)
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.detach().float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), want, rtol=0.1, atol=0.05)


def test_experts_that_somebody_looks_at_are_called():
    """As fairseq's search for the module of a NaN does, by hooks."""
    layer, x = simulated(4)
    want, calls = layer(x), []
    handle = layer.experts.register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(layer(x), want)
    assert len(calls) == 4
    handle.remove()
    layer(x)
    assert len(calls) == 4
    with nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(m)):
        layer(x)
    assert calls.count(layer.experts) == 4
    forward = layer.experts.forward  # fairseq's checkpoint_wrapper replaces it
    layer.experts.forward = lambda *args: calls.append("replaced") or forward(*args)
    layer(x)
    assert calls.count("replaced") == 4


def test_times_are_taken_without_overlap():
    layer, x = simulated(4, record_exchange_time=True)
    _, aux = layer(x, return_aux=True)
    assert aux.metrics_dict()["all_to_all_cpu_time_ms"] == pytest.approx(aux.record.cpu_ms)
    assert aux.record.cpu_ms > 0 and layer.exchange_config.overlap_degree == 1


def test_one_rank_has_nothing_to_overlap(monkeypatch):
    monkeypatch.setattr(call_plan, "stream_of", None)
    layer = MoELayer(M, 4, HIDDEN, exchange=ExchangeConfig(overlap_degree=8))
    assert layer(torch.randn(5, M)).shape == (5, M)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_stream_gives_the_same(layout, own, dtype, rounding, device="cuda"):
    """Copies take the place of messages; memory is given back and taken again between the runs."""
    groups = build_groups(8, simulate_world_size=4)
    x, target = torch.randn(2, 4096, M, device=device, dtype=dtype)
    want = None
    for degree in (1, 4, 4, 8):
        config = ExchangeConfig(overlap_degree=degree)
        layer = make_layer(groups, layout, dtype, own, exchange=config).to(device)
        got = run(layer, x, target)
        want = want or got
        for name, value in want.items():
            assert rms_ratio(got[name], value) < rounding, (degree, name)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("direction", list(Direction))
def test_an_error_in_the_stream_reaches_the_user(direction, own):
    layer, x = simulated(4, own)
    works = use_move(layer, failing(direction))
    with pytest.raises(ValueError, match="the link is down"):
        layer(x).sum().backward()
    layer.exchange_choice = works
    layer(x).sum().backward()


@pytest.mark.parametrize(
    "name, number, sent",  # which call of the experts fails, and what had been sent by then
    [
        ("network_fwd", 1, 5),
        ("network_bwd", 2, 14),
        ("network_bwd_params", 0, 16),
        ("forward", 1, 5),  # of experts of one's own
    ],
)
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
