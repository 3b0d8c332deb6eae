"""``activation_memory``: bits of ``fast``, also with dropout, from fewer bytes.

Against the loop, on ranks, recomputed, in autocast, in kernels: test_product.py.
"""

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.layers import make_layer, run, tokens_of
from helpers.saved import SavedBytes

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

M, F, E = 16, 32, 4
NETWORKS = {
    "squared relu": {"activation": "relu_squared"},
    "geglu with biases": {"expert_network": "geglu", "expert_options": {"bias": True}},
}


def step(mode, dtype, tokens, network, factor):
    """y and the gradients of x and of all parameters, in their order."""
    torch.manual_seed(1)
    dropped = {"dropout": 0.3, "activation_dropout": 0.3, "capacity_factor": factor}
    layer = MoELayer(M, E, F, seed=3, activation_memory=mode, **dropped, **NETWORKS[network])
    layer.to(dtype)
    x, dy = torch.randn(2, tokens, M).to(dtype)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(param.grad for param in layer.parameters())]


WAYS = [
    *(("torch", dtype, 96, n) for n in NETWORKS for dtype in (torch.float32, torch.bfloat16)),
    pytest.param("triton", torch.float32, 9, "geglu with biases", marks=pytest.mark.interpreted),
]


@pytest.mark.parametrize(("way", "dtype", "tokens", "network"), WAYS)
def test_same_bits_and_gradients_as_fast(way, dtype, tokens, network, backend):
    backend(way)
    for factor in (0.0, 0.75):
        want_y, *want = step("fast", dtype, tokens, network, factor)
        for mode in ("lean", "minimal"):
            y, *found = step(mode, dtype, tokens, network, factor)
            assert torch.equal(y, want_y)
            for ours, exact in zip(found, want, strict=True):
                assert rms_ratio(ours, exact) <= (2e-6 if dtype == torch.float32 else 2e-2)
                assert ours.dtype == exact.dtype


@pytest.mark.parametrize("network", ["ffn", "swiglu"])
def test_bytes_per_row(network):
    def kept(mode, storage="same"):
        memory = {"activation_memory": mode, "activation_storage": storage}
        layer = MoELayer(64, 8, 256, capacity_factor=0.0, expert_network=network, **memory)
        x = torch.randn(512, 64, requires_grad=True)
        with SavedBytes(x, *layer.parameters()) as saved:
            layer(x)
        return saved.total() / (2 * 512)

    planes = 2 if network == "swiglu" else 1
    routing = kept("minimal")
    assert routing < 64  # tables and logits
    assert kept("fast") - routing == pytest.approx(4 * (2 * 64 + (planes + 1) * 256), rel=0.01)
    assert kept("lean") - routing == 4 * planes * 256
    assert kept("lean", "fp8") - routing == planes * (256 + 4)


RANKS = [
    # experts, placement, options of the exchange, of the layer
    (4, "replicated", {"overlap_degree": 2}, {"layout": "padded", "dropout": 0.2}),
    (2, "sliced", {"r": 2, "overlap_degree": 2}, {"dropout": 0.2, "activation_dropout": 0.2}),
    (4, "replicated", {}, {"record_exchange_time": True, "local_drop": 0.99}),
]


def lean_is_fast_on_ranks():
    x, target, rows = tokens_of()
    for experts, placement, exchange, options in RANKS:
        groups, results = build_groups(experts, placement=placement), {}
        for mode in ("fast", "lean", "minimal"):
            given = {"exchange": ExchangeConfig(**exchange), "activation_memory": mode}
            layer = make_layer(groups, **{**options, **given})
            torch.manual_seed(1)
            results[mode] = run(layer, x[rows], target[rows])
            for name, exact in results["fast"].items():
                found, case = results[mode][name], (experts, placement, mode, name)
                assert (found - exact).norm() <= 1e-13 * exact.norm() + 1e-13, case
                assert name != "y" or torch.equal(found, exact), case


def test_dropout_on_ranks():
    run_ranks(lean_is_fast_on_ranks, 4)
