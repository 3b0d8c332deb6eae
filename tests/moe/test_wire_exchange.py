"""What travels between ranks in fewer bits: numbers, bytes, errors, every algorithm and layout."""

import functools

import pytest
import torch
import torch.distributed as dist
from helpers.dispatched import spied
from helpers.distributed import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import Direction, ExchangeRecord, build_groups, process_world
from fairseq_tutel.moe import WIRE_ERROR_NAMES, WIRE_LAYERS_NAMES, MoELayer, wire_errors
from fairseq_tutel.moe.wire import wire_format

M = 256
LAYOUTS = {"padded": 1.0, "ragged": 0.0}
# (wire, back, grad) -> formats of tokens, outputs and gradients of fp32
WIRES = {
    ("bf16", "auto", "auto"): ("bf16", "bf16", "bf16"),
    ("fp8", "auto", "auto"): ("e4m3", "bf16", "bf16"),
    ("fp8", "fp8", "fp8"): ("e4m3", "e4m3", "e5m2"),
    ("same", "fp16", "same"): (None, "fp16", None),
}


def _config(algorithm, wire, back, grad, degree=1):
    nodes = {"ranks_per_node": 2} if algorithm == "2dh" else {}
    formats = {"wire": wire, "wire_back": back, "wire_grad": grad}
    return ExchangeConfig(algorithm, overlap_degree=degree, **formats, **nodes)


def _layer(config, num_experts, factor, top_k=1):
    """Experts that give back what they get."""
    groups = build_groups(num_experts)
    experts = [nn.Identity() for _ in range(groups.num_local_experts)]
    options = {"groups": groups, "exchange": config, "top_k": top_k, "capacity_factor": factor}
    torch.manual_seed(5)
    return MoELayer(M, num_experts, experts=experts, **options)


def _arrived(rows, *formats):
    """Rows as they are after these directions."""
    for name in formats:
        if name is not None:
            wire, _ = ops.encode_rows(rows, name)
            rows = ops.decode_rows(wire, name, torch.empty_like(rows))
    return rows


def _tokens(rank):
    torch.manual_seed(rank)
    return torch.randn([24, 0, 9, 17][rank], M) * 10.0 ** torch.randn(())


def _numbers(num_experts, algorithm, degree):
    """The layer's output and gradients are those of rows that were rounded on each direction."""
    rank, _ = process_world()
    for (wire, back, grad), (there, home, gradient) in WIRES.items():
        for layout, factor in LAYOUTS.items():
            config = _config(algorithm, wire, back, grad, degree)
            x = _tokens(rank).requires_grad_()
            dy, where = torch.randn_like(x), str((rank, config, layout))
            given = {"choices": torch.arange(len(x))[:, None] % num_experts}
            given |= {"weights": torch.ones(len(x), 1), "return_aux": True}
            y, aux = _layer(config, num_experts, 8 * factor)(x, **given)
            y.backward(dy)
            want = _arrived(x.detach(), there, home), _arrived(dy, gradient, gradient)
            torch.testing.assert_close((y, x.grad), want, rtol=1e-5, atol=1e-6, msg=where)
            # of what this rank sends for its tokens; after the backward pass of gradients, too
            sums, gradients = aux.record.square_sums, Direction.COMBINE_GRADIENT
            for direction, name in ((Direction.DISPATCH, there), (gradients, gradient)):
                found = direction in sums and bool(sums[direction].any())
                assert found == (name is not None and len(x) > 0), (where, direction)


def _traffic():
    """Bytes of the four directions by format, and those of a layer without wire."""
    rank, size = process_world()
    found = {}

    def step(layer):
        x = _tokens(rank).requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            calls = spied(patch, dist, "all_to_all_single")
            y = layer(x)
            y.square().sum().backward()
        moved = [args[1] for args, _, _ in calls if args[1].dim() == 2]  # and no counts
        return y, x.grad, sum(rows.numel() * rows.element_size() for rows in moved)

    for factor in LAYOUTS.values():
        for wire in ("same", "bf16", "fp16", "fp8"):
            layer = _layer(_config("linear", wire, wire, wire), 4, factor)
            *_, found[factor, wire] = step(layer)
    compact = ExchangeConfig("linear", wire_compact=True)
    results = [step(_layer(config, 4, 4.0, top_k=2)) for config in (compact, ExchangeConfig())]
    torch.testing.assert_close(results[0][:2], results[1][:2])
    found["compact"] = [num_bytes for *_, num_bytes in results]
    return found


def _awkward():
    """A recomputation, whose errors count once, NaN, fp64, half: what runs and gives its result."""
    rank, _ = process_world()
    config = ExchangeConfig(wire="fp8", wire_back="fp8", wire_grad="fp8")
    layer, results = _layer(config, 4, 8.0), []
    for recompute in (False, True):
        x, record = _tokens(rank).requires_grad_(), ExchangeRecord()
        call = functools.partial(layer, record=record)
        y = checkpoint(call, x, use_reentrant=True) if recompute else call(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, *wire_errors([record]).values()))
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        y = _layer(config, 4, 8.0).to(dtype)(_tokens(0).to(dtype))
        assert y.dtype == dtype and y.isfinite().all()
    x = _tokens(0)
    x[3, 130], x[4, 0] = float("nan"), float("inf")
    finite_TM = _layer(config, 4, 0.0)(x).isfinite()
    assert (~finite_TM.all(1)).nonzero().flatten().tolist() == [3, 4]


def _all_on_four_ranks():
    for num_experts, algorithm in ((4, "linear"), (8, "2dh"), (2, "linear")):
        _numbers(num_experts, algorithm, 1)
    _numbers(8, "2dh", 2)
    _awkward()
    return _traffic()


def test_on_four_ranks():
    by_rank = run_ranks(_all_on_four_ranks, 4)
    for factor in LAYOUTS.values():
        total = {w: sum(f[factor, w] for f in by_rank) for w in ("same", "bf16", "fp16", "fp8")}
        assert total["same"] > 0
        assert total["bf16"] == total["same"] / 2
        assert 0.25 * total["same"] < total["fp8"] <= 1.04 * 0.25 * total["same"]
        assert 0.5 * total["same"] < total["fp16"] <= 1.01 * 0.5 * total["same"]
    compact, padded = (sum(f["compact"][i] for f in by_rank) for i in (0, 1))
    assert compact < 0.5 * padded  # a capacity four times of what is needed


def test_same_has_no_codec_nor_has_one_rank():
    alone = MoELayer(8, 4, exchange=ExchangeConfig(wire="fp8"))
    assert MoELayer(8, 8, groups=build_groups(8, simulate_world_size=4)).exchange.codec is None
    assert alone.exchange.codec is None
    assert alone(torch.randn(5, 8), return_aux=True)[1].record is None


def test_formats_of_the_legs():
    for grad, dtype, names in (
        ("auto", torch.float32, ["e4m3", "bf16", "bf16", "bf16"]),
        ("auto", torch.bfloat16, ["e4m3", None, None, None]),  # bf16 would save nothing
        ("fp8", torch.float32, ["e4m3", "bf16", "e5m2", "e5m2"]),
        ("fp8", torch.bfloat16, ["e4m3", None, "e5m2", "e5m2"]),
    ):
        config = ExchangeConfig(wire="fp8", wire_grad=grad)
        assert [wire_format(config, direction, dtype) for direction in Direction] == names


def test_errors_are_those_of_the_formats_and_summed_over_layers():
    groups = build_groups(8, simulate_world_size=4)
    config = ExchangeConfig(wire="fp8", wire_back="fp16", wire_grad="fp8")
    layers = [MoELayer(M, 8, hidden_dim=32, groups=groups, exchange=config) for _ in range(3)]
    x = torch.randn(64, M, requires_grad=True)
    reports = [layer(x, return_aux=True) for layer in layers]
    sum(y.square().sum() for y, _ in reports).backward()
    errors = wire_errors([aux.record for _, aux in reports])
    assert [errors[name].item() for name in WIRE_LAYERS_NAMES] == [3, 3, 3, 3]
    got = dict(zip(Direction, (errors[name].item() / 3 for name in WIRE_ERROR_NAMES), strict=True))
    for direction, want in ((Direction.DISPATCH, 2.6e-2), (Direction.COMBINE, 2.1e-4)):
        assert 0.8 * want < got[direction] < 1.2 * want
    for direction in (Direction.DISPATCH_GRADIENT, Direction.COMBINE_GRADIENT):
        assert 4e-2 < got[direction] < 7e-2
    broken = ExchangeRecord()
    broken.add_square_sums(Direction.DISPATCH, torch.full((2,), torch.inf))
    assert not any(value.item() for value in wire_errors([broken]).values())
