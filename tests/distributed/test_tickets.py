"""Exchanges started now and waited for later: the same bits, in one order on all ranks."""

import time

import pytest
import torch
from helpers.distributed import run_ranks

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups, gather_texts, process_world
from fairseq_tutel.distributed.exchanges import Leg, Wrapper, start
from fairseq_tutel.distributed.lanes import InlineLane, StreamLane, WorkerLane, lane_of

W, M = 4, 6
CHUNKS = (2, 5, 1, 3)  # rows for each rank; what is recorded tells them apart


class Recorded(Wrapper):
    """Writes down the order of legs; memory that is not filled is NaN, not what was there."""

    def __init__(self, inner):
        super().__init__(inner)
        self.log = []

    def receive_buffer(self, rows, leg, parts=None):
        return super().receive_buffer(rows, leg, parts).fill_(torch.nan)

    def move(self, rows, received, leg, parts):
        time.sleep(0.002 * (len(self.log) % 3))  # nobody may be in step by chance
        self.log.append(f"{leg.value} {len(rows) + len(received)}")
        super().move(rows, received, leg, parts)


def _through(exchange, chunks, weight, parts, lane):
    """Exchange, experts and exchange back of several chunks, each started as early as it can be."""
    out = [start(exchange, x, Leg.DISPATCH, p, lane) for x, p in zip(chunks, parts, strict=True)]
    back = []
    for ticket, p in zip(out, parts, strict=True):
        hidden = (ticket.wait() @ weight).tanh()
        back.append(start(exchange, hidden, Leg.COMBINE, p, lane))
    return torch.cat([ticket.wait() for ticket in back])


def _compare(name, even):
    rank, _ = process_world()
    exchange = build_exchange(ExchangeConfig(name, ranks_per_node=2), build_groups(W))
    parts, chunks = [], []
    torch.manual_seed(rank)
    for size in CHUNKS:
        table = [[size if even else (size + 2 * by + to) % 4 for to in range(W)] for by in range(W)]
        sent, received = table[rank], [line[rank] for line in table]
        parts.append(None if even else exchange.parts(sent, received))
        chunks.append(torch.randn(sum(sent), M).double())
    weight = torch.randn(M, M).double()
    target = torch.randn(sum(len(x) for x in chunks), M).double()

    def run(through):
        xs = [x.clone().requires_grad_() for x in chunks]
        w = weight.clone().requires_grad_()
        y = through(xs, w)
        (y * target).sum().backward()
        return [y.detach(), *(x.grad for x in xs), w.grad]

    def one_after_the_other(xs, w):
        return torch.cat(
            [
                exchange.back((exchange.forth(x, p) @ w).tanh(), p)
                for x, p in zip(xs, parts, strict=True)
            ]
        )

    *want, want_w = run(one_after_the_other)
    worker = WorkerLane()
    for lane in (InlineLane(), worker, worker):
        recorded = Recorded(exchange)
        *got, got_w = run(lambda xs, w: _through(recorded, xs, w, parts, lane))  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        torch.testing.assert_close(got_w, want_w, rtol=1e-12, atol=1e-12)  # sums of other order
        legs = [line.rsplit(" ", 1)[0] for line in recorded.log]
        assert legs == [
            leg
            for leg in ("dispatch", "combine", "combine gradient", "dispatch gradient")
            for _ in CHUNKS
        ]
        if even:  # sizes are those of all ranks: the backward pass is the mirror of the forward one
            forward, backward = recorded.log[: 2 * len(CHUNKS)], recorded.log[2 * len(CHUNKS) :]
            assert [line.replace(" gradient", "") for line in backward[::-1]] == forward
            orders = gather_texts("; ".join(recorded.log))
            assert len(set(orders)) == 1


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("name", ["linear", "2dh"])
def test_chunks_in_flight_are_the_same_bit_for_bit(name, even):
    run_ranks(_compare, W, name, even)


class Failing(Wrapper):
    def __init__(self, inner, leg):
        super().__init__(inner)
        self.leg = leg

    def move(self, rows, received, leg, parts):
        if leg is self.leg:
            raise ValueError("the link is down")
        received.copy_(rows)


@pytest.mark.parametrize("lane", [InlineLane(), WorkerLane()])
@pytest.mark.parametrize("leg", [Leg.DISPATCH, Leg.DISPATCH_GRADIENT])
def test_an_error_in_the_lane_reaches_the_caller(leg, lane):
    exchange = Failing(build_exchange("linear", build_groups(W, simulate_world_size=W)), leg)
    rows = torch.randn(W, M, requires_grad=True)
    with pytest.raises(ValueError, match="the link is down"):
        start(exchange, rows, Leg.DISPATCH, None, lane).wait().sum().backward()


def test_a_ticket_is_waited_for_once():
    exchange = build_exchange("linear", build_groups(W, simulate_world_size=W))
    ticket = start(exchange, torch.randn(W, M), Leg.DISPATCH, None, lane_of(torch.device("cpu")))
    assert ticket.wait().shape == (W, M)
    with pytest.raises(RuntimeError, match="the dispatch exchange was waited for before"):
        ticket.wait()


@pytest.mark.gpu
def test_a_second_stream_gives_the_same_bits():
    """Copies take the place of messages; products keep the first stream busy meanwhile."""
    device = torch.device("cuda")
    exchange = build_exchange("linear", build_groups(W, simulate_world_size=W))
    torch.manual_seed(0)
    chunks = [torch.randn(W * 2048, 512, device=device) for _ in range(4)]
    weight = torch.randn(512, 512, device=device) / 16
    results = []
    for lane in (InlineLane(), StreamLane(device)):
        for _ in range(5):
            xs = [x.clone().requires_grad_() for x in chunks]
            recorded = Recorded(exchange)
            y = _through(recorded, xs, weight, [None] * 4, lane)
            y.square().sum().backward()
            results.append([y.detach(), *(x.grad for x in xs)])
            del y, xs
    for got in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))
