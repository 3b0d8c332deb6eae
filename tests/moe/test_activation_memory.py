"""``activation_memory``: bits of ``fast``, also with dropout, from fewer bytes.

Against the loop, on ranks, recomputed, in autocast: test_product.py.
"""

import itertools

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.layers import make_layer, run, tokens_of
from helpers.saved import SavedBytes

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops import backend as chooser

M, F, E, T = 16, 32, 4, 96
MODES = ("lean", "minimal")
NETWORKS = {
    "squared relu": {"activation": "relu_squared"},
    "geglu with biases": {"expert_network": "geglu", "expert_options": {"bias": True}},
}


def step(mode, dtype=torch.float64, compiled=False, tokens=T, **options):
    """y and the gradients of x and of all parameters, in their order."""
    options = {"top_k": 2, "capacity_factor": 0.0, **options}
    torch.manual_seed(1)
    layer = MoELayer(M, E, F, seed=3, activation_memory=mode, **options).to(dtype)
    generator = torch.Generator().manual_seed(5)
    x, dy = torch.randn(2, tokens, M, generator=generator, dtype=torch.float64).to(dtype)
    x.requires_grad_()
    torch.manual_seed(2)
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    y = call(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), [x.grad, *(param.grad for param in layer.parameters())]


def assert_equal_but_for_rounding(found, wanted, dtype):
    largest = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours - exact).double().norm() <= largest * exact.double().norm()
        assert ours.dtype == exact.dtype


def check_modes(dtype, **options):
    """Outputs of the modes are those of ``fast`` to the bit, gradients but for rounding."""
    options["activation_dropout"] = options.get("dropout", 0.0)
    y, gradients = step("fast", dtype, **options)
    for mode in MODES:
        lean_y, lean_gradients = step(mode, dtype, **options)
        torch.testing.assert_close(lean_y, y, rtol=0, atol=0)
        assert_equal_but_for_rounding(lean_gradients, gradients, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("network", NETWORKS)
def test_same_bits_and_gradients_as_fast(network, dtype):
    for factor in (0.0, 0.75):
        check_modes(dtype, capacity_factor=factor, dropout=0.3, **NETWORKS[network])


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("network", "layout"),
    [("squared relu", {"capacity_factor": 0.75, "dropout": 0.3}), ("geglu with biases", {})],
)
def test_kernels(network, layout, monkeypatch):
    monkeypatch.setattr(chooser, "_requested", "triton")
    check_modes(torch.float32, tokens=9, **NETWORKS[network], **layout)


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


@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode):
    y, gradients = step("fast", torch.float32)
    compiled_y, compiled = step(mode, torch.float32, compiled=True)
    torch.testing.assert_close(compiled_y, y)
    assert_equal_but_for_rounding(compiled, gradients, torch.float32)


RANKS = [
    # experts, placement, options of the exchange, of the layer
    (4, "replicated", {"overlap_degree": 2}, {"layout": "padded", "dropout": 0.2}),
    (2, "sliced", {"r": 1}, {"dropout": 0.2, "activation_dropout": 0.2}),
    (2, "sliced", {"r": 2, "overlap_degree": 2}, {"dropout": 0.2}),
    (2, "sliced", {"r": 0}, {"dropout": 0.2}),
    (4, "replicated", {}, {"record_exchange_time": True}),
    (4, "replicated", {}, {"local_drop": 0.99}),
]


def lean_is_fast_on_ranks(cases):
    x, target, rows = tokens_of()
    for experts, placement, exchange, options in cases:
        groups, results = build_groups(experts, placement=placement), {}
        for mode in ("fast", *MODES):
            given = {"exchange": ExchangeConfig(**exchange), "activation_memory": mode}
            layer = make_layer(groups, **{**options, **given})
            torch.manual_seed(1)
            results[mode] = run(layer, x[rows], target[rows])
        for mode, (name, exact) in itertools.product(MODES, results["fast"].items()):
            case = (experts, placement, exchange, options, mode, name)
            found = results[mode][name]
            assert (found - exact).norm() <= 1e-13 * exact.norm() + 1e-13, case
            assert name != "y" or torch.equal(found, exact), case


def test_on_ranks():
    run_ranks(lean_is_fast_on_ranks, 4, RANKS)
