"""Dropout of the experts' network: the same masks whatever is kept, recomputed or exchanged.

Without dropout: test_product.py, test_fuzz.py.
"""

import itertools

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import on_ranks
from helpers.layers import make_layer, run, tokens_of
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import ops, training
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, possible_r, process_world
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.source_dropout import SourceDropout

M, F, E = 16, 32, 4
BOTH = {"dropout": 0.3, "activation_dropout": 0.3}
NETWORKS = {
    "squared relu": {"activation": "relu_squared"},
    "geglu with biases": {"expert_network": "geglu", "expert_options": {"bias": True}},
}


def step(mode, dtype, tokens, network, factor):
    """y and the gradients of x and of all parameters, in their order."""
    torch.manual_seed(1)
    options = {**BOTH, "capacity_factor": factor, **NETWORKS[network]}
    layer = MoELayer(M, E, F, seed=3, activation_memory=mode, **options).to(dtype)
    x, dy = torch.randn(2, tokens, M).to(dtype)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(param.grad for param in layer.parameters())]


WAYS = [
    *(("torch", dtype, 96, n) for n in NETWORKS for dtype in (torch.float32, torch.bfloat16)),
    pytest.param("triton", torch.float32, 5, "geglu with biases", marks=pytest.mark.interpreted),
]


@pytest.mark.parametrize(("way", "dtype", "tokens", "network"), WAYS)
def test_lean_memory_has_the_bits_and_gradients_of_fast(way, dtype, tokens, network, backend):
    backend(way)
    for factor in (0.0, 0.75)[way == "triton" :]:  # interpreted kernels take long
        want_y, *want = step("fast", dtype, tokens, network, factor)
        for mode in ("lean", "minimal"):
            y, *found = step(mode, dtype, tokens, network, factor)
            assert torch.equal(y, want_y)
            for ours, exact in zip(found, want, strict=True):
                assert rms_ratio(ours, exact) <= (2e-6 if dtype == torch.float32 else 2e-2)
                assert ours.dtype == exact.dtype


@pytest.mark.parametrize("network", ["ffn", "swiglu"])
def test_lora_drops_out_as_the_merged_weights(network):
    x, found = torch.randn(24, M, dtype=torch.float64), []
    for merged in (False, True):
        torch.manual_seed(7)
        layer = MoELayer(M, E, F, capacity_factor=0, seed=3, expert_network=network, **BOTH)
        training.add_lora(layer.double(), rank=3)
        for param in layer.experts.updates.values():
            torch.nn.init.normal_(param)
        if merged:
            training.merge_lora(layer)
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=False)
        y.square().sum().backward()
        found.append((y, leaf.grad))
    torch.testing.assert_close(*found)


def test_networks_without_an_operator_drop_out_by_the_expected_value():
    x = torch.randn(24, M, dtype=torch.float64)
    for dropped in ({"dropout": 0.5}, {"activation_dropout": 0.5}):
        given = {"capacity_factor": 0, "expert_network": "clamped_swiglu", **dropped}
        layer = MoELayer(M, E, 8, seed=3, **given).double()
        ys = layer(x.repeat(800, 1)).view(800, 24, M).mean(0)
        want = layer.eval()(x)
        assert not torch.equal(layer.train()(x), want)
        assert (ys - want).abs().max() < 0.2 * want.abs().max()


def _run(groups, layout, memory, r, degree, recompute, **dropped):
    rank, _ = process_world()
    x, target, rows = tokens_of()
    exchange = ExchangeConfig(overlap_degree=degree, r=r)
    options = {"activation_memory": memory, "exchange": exchange, **dropped}
    layer = make_layer(groups, layout, **options)
    torch.manual_seed(rank)
    return run(layer, x[rows], target[rows], recompute)


VARIANTS = [("lean", None), ("minimal", None), ("fast", False)]  # memory, recomputation


@on_ranks(4, timeout=250)
def test_masks_are_those_of_the_tokens():
    """At any r of slices and degree, however the activations are kept or recomputed."""
    for experts, dropped in ((2, {"dropout": 0.5}), (4, {"dropout": 0.5}), (2, BOTH)):
        groups, outputs = build_groups(experts, placement="sliced"), []
        ways = itertools.product(("padded", "ragged"), possible_r(groups), (1, 4))
        for number, (layout, *way) in enumerate(ways):
            want = _run(groups, layout, "fast", *way, None, **dropped)
            outputs.append(want)
            memory, recompute = VARIANTS[number % 3]
            found = _run(groups, layout, memory, *way, recompute, **dropped)
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
            # masks inside of the experts are those of rows
            for name in ("y", "x") if dropped is not BOTH else ():
                torch.testing.assert_close(want[name], outputs[0][name], rtol=0, atol=1e-12)
        plain = _run(groups, "ragged", "fast", 1, 1, None)
        assert not len(plain["y"]) or rms_ratio(want["y"], plain["y"]) > 0.1


def test_dropout_is_that_of_the_pair_of_each_row():
    """Rows of two tokens with two choices, of two parts each; some are empty."""
    pair_of_row = [7, 0, -1, 2, 5, 4]  # t * 4 + part * 2 + choice
    rows, keep = torch.randn(6, M), torch.rand(4, M) < 0.5
    drop = SourceDropout(keep, copies=2, dropout=0.5)
    dest_row = torch.empty(2, 4, dtype=torch.int32)  # only its shape counts
    got = drop(rows, dest_row, torch.tensor(pair_of_row, dtype=torch.int32))
    for row, pair in enumerate(pair_of_row):
        if pair >= 0:
            choice = 2 * (pair // 4) + pair % 2
            assert torch.equal(got[row], torch.where(keep[choice], 2 * rows[row], 0.0))


def test_parts_of_an_expert_draw_unlike_masks():
    seeds = []
    for part in range(3):
        torch.manual_seed(0)
        seed = ops.FFNOptions("relu", (0.5, 0.0), part).draw_seed(torch.device("cpu"))
        seeds += [int(seed), int(seed) + 1]  # of both masks
    assert len(set(seeds)) == 6
