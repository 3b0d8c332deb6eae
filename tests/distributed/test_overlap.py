"""Exchange and experts in chunks that overlap: the results of one process, in one order everywhere.

Ranks compare what they compute with the same layer that sees all tokens, with nothing dropped; what
is dropped does not depend on the degree, which is asserted apart.
"""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import (
    ExpertParallelGroups,
    build_groups,
    gather_texts,
    process_world,
)
from fairseq_tutel.distributed.exchanges import Wrapper
from fairseq_tutel.distributed.lanes import InlineLane
from fairseq_tutel.moe import MoELayer, overlap

M, HIDDEN = 6, 8
# ranks -> (experts, ranks per node): E < W, E = W, E > W
PLACES = {4: [(2, 2), (4, 2), (8, 2)], 8: [(4, 2), (8, 4), (16, 2)]}
TOKENS = {
    "equal": [6] * 8,
    "uneven": [9, 5, 2, 13, 1, 8, 3, 11],
    "empty": [9, 0, 2, 13, 0, 8, 3, 11],
}
# capacity factors that drop nothing, and evaluation
LAYOUTS = {"padded": (8.0, True), "ragged": (0.0, True), "evaluation": (1.0, False)}
DEGREES = (1, 2, 4, 8)
# of a result in this dtype to that of degree 1, in units of its rounding: products of other shapes
# add up in another order
UNITS = {torch.float64: 20, torch.float32: 20, torch.bfloat16: 1.5, torch.float16: 1.5}


class OwnExpert(nn.Sequential):
    """As a user may write one."""

    def __init__(self, number):
        torch.manual_seed(100 + number)
        super().__init__(nn.Linear(M, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, M))


def make_layer(groups, layout, dtype, exchange, own=False, **options):
    factor, training = LAYOUTS[layout]
    experts = [OwnExpert(number) for number in groups.local_experts] if own else None
    torch.manual_seed(7)
    layer = MoELayer(
        M,
        groups.num_experts,
        HIDDEN,
        groups=groups,
        exchange=exchange,
        seed=3,
        capacity_factor=factor,
        experts=experts,
        **options,
    )
    return layer.to(dtype).train(training)


def run(layer, x, target, recompute=None):
    """y and the gradients of x and of all parameters, by name."""
    x = x.clone().requires_grad_()
    y = layer(x) if recompute is None else checkpoint(layer, x, use_reentrant=recompute)
    (y.float() * target.float()).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def experts_of_all_ranks(groups, grads):
    """Gradients of this rank's experts, summed over the ranks that hold them; the gate's, too."""
    for name, grad in grads.items():
        if name.startswith("experts.") and groups.replica_group is not None:
            dist.all_reduce(grad, group=groups.replica_group)
        elif name.startswith("gate."):
            dist.all_reduce(grad)
    return grads


def own_part(whole, rank, sizes, groups, own):
    """Of the results of one process what a rank has."""
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    local, found = groups.local_experts, {}
    for name, value in whole.items():
        if name in ("y", "x"):
            found[name] = value[rows]
        elif name.startswith("gate."):
            found[name] = value
        elif own:  # experts.{number}.{layer}
            number, rest = name.removeprefix("experts.").split(".", 1)
            if int(number) in local:
                found[f"experts.{local.index(int(number))}.{rest}"] = value
        else:
            found[name] = value[local.start : local.stop]
    return found


def tokens_of(world_size, kind, dtype):
    sizes = TOKENS[kind][:world_size]
    torch.manual_seed(11)
    return sizes, torch.randn(sum(sizes), M).to(dtype), torch.randn(sum(sizes), M).to(dtype)


def _compare_with_one_process():
    rank, world_size = process_world()
    numbers = itertools.count()
    for (experts, local), layout, kind, own in itertools.product(
        PLACES[world_size], LAYOUTS, TOKENS, (False, True)
    ):
        sizes, x, target = tokens_of(world_size, kind, torch.float64)
        groups = build_groups(experts)
        alone = make_layer(ExpertParallelGroups(experts), layout, torch.float64, "linear", own)
        want = own_part(run(alone, x, target), rank, sizes, groups, own)
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for name, degree in itertools.product(("linear", "2dh"), DEGREES):
            number = next(numbers)
            # every algorithm and degree meets every layout and kind, not all of them together
            if number % (3 ** ((own or kind == "uneven") + (world_size == 8))):
                continue
            case = (experts, layout, kind, own, name, degree)
            layer = make_layer(
                groups, layout, torch.float64, ExchangeConfig(name, local, degree), own
            )
            recompute = (None, True, False)[number // 8 % 3]
            got = run(layer, x[rows], target[rows], recompute)
            got = experts_of_all_ranks(groups, got)
            assert set(got) == set(want)
            for key, value in want.items():
                scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
                torch.testing.assert_close(
                    got[key],
                    value,
                    rtol=0,
                    atol=1e-12 * scale,
                    msg=lambda m: f"{case}, {key}: {m}",  # noqa: B023
                )


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_degree_gives_what_one_process_computes(world_size):
    run_ranks(_compare_with_one_process, world_size, timeout=250)


def _compare_in_other_dtypes():
    rank, world_size = process_world()
    for (experts, local), layout, dtype in itertools.product(PLACES[world_size], LAYOUTS, UNITS):
        sizes, x, target = tokens_of(world_size, "empty", dtype)
        rows, groups = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])), build_groups(experts)
        want = None
        # degree 1 first; the hierarchical exchange is bit-equal, see above and its own test
        for name, degree in (("linear", 1), ("linear", 2), ("2dh", 4), ("linear", 8)):
            case = (experts, layout, dtype, name, degree)
            layer = make_layer(groups, layout, dtype, ExchangeConfig(name, local, degree))
            got = run(layer, x[rows], target[rows])
            want = want or got
            for key, value in want.items():
                assert got[key].dtype == value.dtype and torch.isfinite(got[key]).all()
                if value.any():
                    limit = UNITS[dtype] * torch.finfo(dtype).eps
                    assert rms_ratio(got[key], value) < limit, (case, key)


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_degree_changes_rounding_only(world_size):
    run_ranks(_compare_in_other_dtypes, world_size, timeout=250)


class Recorded(Wrapper):
    """Writes down the order of legs; memory that is not filled is NaN, not what was there."""

    def __init__(self, inner, log=None):
        super().__init__(inner)
        self.log = [] if log is None else log

    def for_message(self, num_bytes):
        return type(self)(self.inner.for_message(num_bytes), self.log)

    def receive_buffer(self, rows, leg, parts=None):
        return super().receive_buffer(rows, leg, parts).fill_(torch.nan)

    def move(self, rows, received, leg, parts):
        received.fill_(torch.nan)
        time.sleep(0.002 * ((len(self.log) + self.groups.rank) % 3))  # nobody is in step by chance
        self.log.append(f"{leg.value} {len(rows) if parts is None else ''}")
        super().move(rows, received, leg, parts)


def _record():
    """One order on all ranks, also where one has no tokens; drops as without overlap."""
    rank, world_size = process_world()
    sizes, x, target = tokens_of(world_size, "empty", torch.float64)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for own, factor, name in itertools.product((False, True), (1.0, -0.5), ("linear", "2dh")):
        logs = {}
        for degree in (1, 4):
            config = ExchangeConfig(name, 2, degree)
            layer = make_layer(build_groups(8), "padded", torch.float64, config, own)
            layer.config = type(layer.config)(num_experts=8, capacity_factor=factor)
            layer.exchange = Recorded(layer.exchange)
            given = x[rows].clone().requires_grad_()
            # used twice in one pass, and two passes before the gradients are looked at
            for _ in range(2):
                y, aux = layer(given, return_aux=True)
                y = layer(y + given)
                (y * target[rows]).sum().backward()
            grads = [p.grad for p in layer.parameters()]
            logs[degree] = layer.exchange.log, [y.detach(), given.grad, *grads], aux
        (_, want, want_aux), (log, got, aux) = logs[1], logs[4]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        assert torch.equal(aux.num_kept_per_expert_E, want_aux.num_kept_per_expert_E)
        legs = [line.rsplit(" ", 1)[0] for line in log]
        forward = [leg for leg in ("dispatch", "combine") for _ in range(4)]
        backward = [f"{leg} gradient" for leg in forward[::-1]]
        assert legs == 2 * (2 * forward + 2 * backward)
        assert len(set(gather_texts("; ".join(log)))) == 1


def test_collectives_are_in_one_order_on_all_ranks():
    run_ranks(_record, 4, timeout=100)


# in one process, which plays a rank of four: copies take the place of messages


def simulated(degree, own=False, **options):
    torch.manual_seed(0)
    groups = build_groups(8, simulate_world_size=4)
    config = ExchangeConfig(overlap_degree=degree)
    layer = make_layer(groups, "padded", torch.float64, config, own, **options)
    return layer, torch.randn(32, M, dtype=torch.float64, requires_grad=True)


class WritingLane:
    """Writes down when work is queued and when it is waited for."""

    def __init__(self):
        self.log = []
        self.numbers = itertools.count()

    def submit(self, work):
        number = next(self.numbers)
        self.log.append(f">{number}")
        InlineLane().submit(work)
        return lambda: self.log.append(f".{number}")


def test_schedule_is_that_of_the_docstring(monkeypatch):
    lane = WritingLane()
    monkeypatch.setattr(overlap, "lane_of", lambda device: lane)

    def noted(name, word):
        function = getattr(ops, name)

        def call(*args, **kwargs):
            lane.log.append(word)
            return function(*args, **kwargs)

        monkeypatch.setattr(ops, name, call)

    noted("ffn_chunk", "F")
    noted("ffn_chunk_bwd", "B")
    noted("ffn_chunks_bwd_params", "W")
    layer, x = simulated(4)
    y = layer(x)
    assert " ".join(lane.log) == ">0 >1 >2 >3 .0 F >4 .1 F >5 .2 F >6 .3 F >7 .4 .5 .6 .7"
    lane.log.clear()
    y.sum().backward()
    assert " ".join(lane.log) == (
        ">8 >9 >10 >11 .8 B >12 .9 B >13 .10 B >14 .11 B >15 W .12 .13 .14 .15"
    )
    # frozen experts have no weight gradients, frozen tokens nobody to send theirs to
    for frozen, missing in (("experts", "W"), ("x", ">15")):
        layer.requires_grad_(True)
        if frozen == "experts":
            layer.experts.requires_grad_(False)
        lane.numbers = itertools.count()
        y = layer(x if frozen == "experts" else x.detach())
        lane.log.clear()
        y.sum().backward()
        assert missing not in lane.log and ">11" in lane.log


@pytest.mark.parametrize("own", [False, True])
def test_modes_of_the_caller(own):
    """Modes are settings of each thread, and the lane has its own."""
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


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_chunks_in_fewer_bits(wire, own):
    found = []
    for degree in (1, 4):
        groups = build_groups(8, simulate_world_size=4)
        config = ExchangeConfig(overlap_degree=degree, wire=wire, wire_grad=wire)
        layer = make_layer(groups, "padded", torch.float64, config, own)
        torch.manual_seed(0)
        x = torch.randn(32, M, dtype=torch.float64)
        found.append(run(layer, x, x.flip(0)))
        _, aux = layer(x, return_aux=True)
        errors = aux.wire_sums[:, 0] / aux.wire_sums[:, 1]  # measured on some rows of a message
        assert (errors > 0).all() and (errors < 1e-2).all()
    for name, value in found[0].items():
        assert value.any() and rms_ratio(found[1][name], value) < 1e-4, name


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


def test_dropout_has_one_mask_forth_and_back():
    layer, _ = simulated(4, dropout=0.5, activation_dropout=0.25)
    layer.float()
    x = torch.randn(32, M, requires_grad=True)
    for recompute in (True, False):
        torch.manual_seed(1)
        want = torch.autograd.grad(layer(x).square().sum(), [x, layer.experts.fc1_weight])
        torch.manual_seed(1)
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        got = torch.autograd.grad(y.square().sum(), [x, layer.experts.fc1_weight])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # the slope along a direction of the weights, with the same masks
    weight, step = layer.experts.fc2_weight, 1e-2

    def loss():
        torch.manual_seed(1)
        return layer(x).square().sum()

    (gradient,) = torch.autograd.grad(loss(), [weight])
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        below = loss()
    slope = (above - below) / (2 * step)
    torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=1e-3, atol=1e-3)


def test_times_are_taken_without_overlap():
    layer, x = simulated(4, record_exchange_time=True)
    _, aux = layer(x, return_aux=True)
    assert aux.exchange_cpu_ms > 0 and layer.exchange_config.overlap_degree == 1


def test_one_rank_has_nothing_to_overlap(monkeypatch):
    monkeypatch.setattr(overlap, "lane_of", None)
    layer = MoELayer(M, 4, HIDDEN, exchange=ExchangeConfig(overlap_degree=8))
    assert layer(torch.randn(5, M)).shape == (5, M)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_stream_gives_the_same(layout, own, device="cuda"):
    """Copies take the place of messages; memory is given back and taken again between the runs."""
    groups = build_groups(8, simulate_world_size=4)
    x, target = torch.randn(2, 4096, M, device=device)
    want = None
    for degree in (1, 4, 4, 8):
        config = ExchangeConfig(overlap_degree=degree)
        layer = make_layer(groups, layout, torch.float32, config, own).to(device)
        got = run(layer, x, target)
        want = want or got
        for name, value in want.items():
            assert rms_ratio(got[name], value) < 1e-5, (degree, name)
