"""Errors between chunks that overlap: of the exchange, and of the experts."""

import time

import pytest
import torch
from helpers.distributed import RanksFailed, run_ranks
from torch import nn

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.distributed.exchanges import Leg, Wrapper
from fairseq_tutel.moe import MoELayer

M, HIDDEN = 6, 8
DEGREE = 4


def make_layer(groups, own=False):
    experts = [nn.Sequential(nn.Linear(M, M), nn.Tanh()) for _ in groups.local_experts]
    layer = MoELayer(
        M,
        groups.num_experts,
        HIDDEN,
        groups=groups,
        exchange=ExchangeConfig(overlap_degree=DEGREE),
        capacity_factor=8.0,
        experts=experts if own else None,
    )
    return layer.double()


def simulated(own):
    """A rank of four in one process, where copies take the place of messages."""
    torch.manual_seed(0)
    layer = make_layer(build_groups(8, simulate_world_size=4), own)
    return layer, torch.randn(32, M, dtype=torch.float64, requires_grad=True)


class Failing(Wrapper):
    def __init__(self, inner, leg):
        super().__init__(inner)
        self.leg = leg

    def for_message(self, num_bytes):
        return self

    def move(self, rows, received, leg, parts):
        if leg is self.leg:
            raise ValueError("the link is down")
        self.inner.move(rows, received, leg, parts)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("leg", list(Leg))
def test_an_error_in_the_lane_reaches_the_user(leg, own):
    layer, x = simulated(own)
    works = layer.exchange
    layer.exchange = Failing(works, leg)
    with pytest.raises(ValueError, match="the link is down"):
        layer(x).sum().backward()
    layer.exchange = works
    layer(x).sum().backward()


def _fail_on_one_rank():
    layer = make_layer(build_groups(4))
    if process_world()[0] == 1:
        layer.exchange = Failing(layer.exchange, Leg.DISPATCH)
    layer(torch.randn(6, M, dtype=torch.float64))


def test_an_error_in_the_lane_of_one_rank_ends_all():
    with pytest.raises(RanksFailed, match="the link is down"):
        run_ranks(_fail_on_one_rank, 2, timeout=40)


class Slow(Wrapper):
    """Counts what was moved; the last arrive long after the first."""

    def __init__(self, inner):
        super().__init__(inner)
        self.moved = 0

    def for_message(self, num_bytes):
        return self

    def move(self, rows, received, leg, parts):
        time.sleep(0.02)
        super().move(rows, received, leg, parts)
        self.moved += 1


def failing_at(number, function):
    """The function, whose call of that number (from 0) raises."""
    calls = iter(range(1000))

    def call(*args, **kwargs):
        if next(calls) == number:
            raise ValueError("out of memory")
        return function(*args, **kwargs)

    return call


# where the experts fail, and what had been sent by then
FAILURES = {
    "forth": ("ffn_chunk", 1, DEGREE + 1),
    "back": ("ffn_chunk_bwd", 2, 3 * DEGREE + 2),
    "weights": ("ffn_chunks_bwd_params", 0, 4 * DEGREE),
}


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_of_the_experts_comes_after_what_is_under_way(where, monkeypatch):
    name, number, sent = FAILURES[where]
    layer, x = simulated(own=False)
    layer.exchange = slow = Slow(layer.exchange)
    with monkeypatch.context() as patch:
        patch.setattr(ops, name, failing_at(number, getattr(ops, name)))
        with pytest.raises(ValueError, match="out of memory"):
            layer(x).sum().backward()
        assert slow.moved == sent
    layer(x).sum().backward()


def test_an_error_of_own_experts_comes_after_what_is_under_way(monkeypatch):
    layer, x = simulated(own=True)
    layer.exchange = slow = Slow(layer.exchange)
    with monkeypatch.context() as patch:
        patch.setattr(layer.experts, "forward", failing_at(1, layer.experts.forward))
        with pytest.raises(ValueError, match="out of memory"):
            layer(x)
        assert slow.moved == DEGREE + 1
    layer(x).sum().backward()
