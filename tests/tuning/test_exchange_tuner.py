"""The tuner in a plain loop of layers on several ranks, with times that are injected."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers.distributed import on_ranks

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import StepAgreement, build_groups, gather_texts, process_world
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.tuning import ExchangeTuner, candidates, exchange_tuner
from fairseq_tutel.tuning import timer as timer_module
from fairseq_tutel.tuning.timer import RegionTimer

M = 8
# microseconds by capacity factor: 4096 tokens of 2 ranks, 4 experts: capacities 1024 and 4096
TIMES = {1.0: {1: 4000, 2: 3000, 4: 2000, 8: 2500}, 4.0: {1: 9000, 2: 12000, 4: 16000, 8: 20000}}
TOKENS = 2048


class FakeTimer(RegionTimer):
    """Says what the table has for the exchange that was used, as rank 1 a little later."""

    table, asked = None, {}

    @property
    def microseconds(self):
        rank, _ = process_world()
        times = FakeTimer.asked.setdefault(id(self), [0, self.us])
        times[0] += 1
        return None if rank == 1 and times[0] == 1 else self.us + 5 * rank


def run(tuner, num_steps, factor):
    """Agreements of training steps; the exchanges that they use."""
    used = []
    for _ in range(num_steps):
        step = tuner.agree(TOKENS, torch.float32, capacity_factor=factor)
        used.append(step.exchange)
        if step.timer is not None:
            step.timer.us = TIMES[factor][step.exchange.overlap_degree]
    return used


@on_ranks(2, timeout=120)
def test_ranks_find_the_optimum_of_a_table_and_go_on_from_it():
    exchange_tuner.RegionTimer = FakeTimer
    layers = [MoELayer(M, 4, 8, groups=build_groups(4), seed=seed) for seed in (3, 4)]
    tuner = ExchangeTuner(layers, ["overlap_degree"], max_loss=1.0)
    used = [run(tuner, 70, factor) for factor in (1.0, 4.0, 1.0, 4.0)]
    assert used[0][0] == ExchangeConfig() and used[0][-1].overlap_degree == 4
    assert {each.overlap_degree for each in used[1]} > {1} and used[1][-1].overlap_degree == 1
    # known keys are not searched again
    assert {each.overlap_degree for each in used[2]} == {4}
    assert {each.overlap_degree for each in used[3]} == {1}
    events = tuner.take_events()
    lines = [exchange_tuner.describe_tuning(e) for e in events if e["what"] == "decision"]
    assert len(lines) == 2
    assert lines[0].startswith("exchange for float32, model dim 8, 4 experts, top-2, ")
    assert ", capacity 1024 to 1151: overlap_degree=4, 2.00 ms vs 4.00 ms at first" in lines[0]
    assert len(set(gather_texts(json.dumps([events, tuner.file()])))) == 1

    # a new process goes on; another one is pinned and measures nothing
    again = ExchangeTuner(layers, ["overlap_degree"])
    again.resume(json.loads(json.dumps(tuner.state())))
    assert run(again, 3, 1.0) == used[2][:3] and not again.take_events()
    pinned = ExchangeTuner(layers, ["overlap_degree"], pinned=tuner.file())
    step = pinned.agree(TOKENS, torch.float32, capacity_factor=1.0)
    assert step.exchange.overlap_degree == 4 and step.timer is None and pinned.is_pinned
    with pytest.MonkeyPatch.context() as patch:  # of another dtype it knows nothing, and says so
        told = []
        patch.setattr(exchange_tuner.logger, "warning", told.append)
        steps = [pinned.agree(TOKENS, torch.float16, capacity_factor=1.0) for _ in range(2)]
    assert {each.exchange for each in steps} == {ExchangeConfig()}
    assert len(told) == 1 and "none for float16, model dim 8, 4 exp" in told[0], told
    with pytest.raises(ValueError, match="made with ranks = 8, and this run has 2"):
        other = tuner.file().replace('"ranks": 2', '"ranks": 8').replace('degree": 4', 'degree": 5')
        ExchangeTuner(layers, ["overlap_degree"], pinned=other)
    with pytest.raises(ValueError, match="'wire' cannot be tuned"):
        ExchangeTuner(layers, ["wire"])
    with pytest.raises(ValueError, match="layers of one tuner have one model_dim"):
        ExchangeTuner([layers[0], MoELayer(4, 4, 8, groups=layers[0].groups)])
    for layer in layers:
        layer.eval()
    step = tuner.agree(8, torch.float32)
    assert step.exchange is None and step.timer is None


@on_ranks(2, timeout=120)
def test_one_expert_in_two_slices_has_r_of_1_2_and_0():
    """What does not fit in memory is no choice."""
    exchange_tuner.RegionTimer = FakeTimer
    groups = build_groups(1, placement="sliced")
    layer = MoELayer(M, 1, 8, groups=groups, top_k=1, seed=3)
    # r = 0 gathers two slices of 304 bytes; r = 1 does, too, but is what the layer has
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "free_memory", lambda device: 2000)  # of both ranks
        tuner = ExchangeTuner([layer], ["r"], max_loss=1.0)
    assert tuner.choices == [{"r": 1}, {"r": 2}]
    tuner, used = ExchangeTuner([layer], ["r"], max_loss=1.0), []
    for _ in range(30):
        step = tuner.agree(640, torch.float32)
        used.append(step.exchange.r)
        if step.timer is not None:
            step.timer.us = {1: 3000, 2: 1000, 0: 2000}[step.exchange.r]
        layer(torch.randn(640, M, requires_grad=True), step=step).sum().backward()
        assert step.timer is None or RegionTimer.microseconds.fget(step.timer) > 0
    assert set(used) == {0, 1, 2} and used[-1] == 2


def test_one_rank_has_nothing_to_tune():
    layer = MoELayer(M, 4, 8)
    step = ExchangeTuner([layer]).agree(5, torch.float32)
    assert isinstance(step, StepAgreement) and step.exchange is None
    assert layer(torch.randn(5, M), step=step).shape == (5, M)


# stands for the module time; time passes where a test says so
clock = SimpleNamespace(nanoseconds=0, perf_counter_ns=lambda: clock.nanoseconds)


class Slow(torch.autograd.Function):
    """Takes 20 us, and 30 us in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        clock.nanoseconds += 20_000
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        clock.nanoseconds += 30_000
        return 2 * grad


@pytest.mark.parametrize("recompute", [False, True])
def test_a_timer_sees_forward_recomputation_and_backward(recompute, monkeypatch):
    monkeypatch.setattr(timer_module, "time", clock)
    timer, x = RegionTimer(), torch.ones(3, requires_grad=True)
    assert timer.microseconds is None

    def call(x):
        x, span = timer.begin(x)
        return timer.end(Slow.apply(x), span)

    y = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=True) if recompute else call(x)
    assert recompute or timer.microseconds is None  # the backward pass is to come
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert timer.microseconds == (70 if recompute else 50)
    forward_only = RegionTimer()
    inside, span = forward_only.begin(torch.ones(3))
    forward_only.end(Slow.apply(inside), span)
    assert forward_only.microseconds == 20


def test_a_timed_region_may_be_changed_in_place_and_recomputed_without_reentrant_autograd():
    timer, x = RegionTimer(), torch.ones(3, requires_grad=True)

    def call(x):
        inside, span = timer.begin(x)
        y = timer.end(2 * inside, span)
        y += x
        return y.tanh()

    torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False).sum().backward()
    assert torch.allclose(x.grad, 3 * (1 - torch.tensor(3.0).tanh() ** 2).expand(3))
    assert timer.microseconds is not None  # the graph of the recomputation has no backward pass
