"""Experts whose forward pass multiplies in fp8, emulated on a CPU."""

import contextlib
import importlib
import logging

import pytest
import torch
from helpers.assertions import assert_close, rms_ratio
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_tutel import ops
from fairseq_tutel.backends import _fp8 as fp8
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops.fp8 import check_fp8

M, F, E = 32, 64, 4


@pytest.fixture(autouse=True)
def emulated(request, monkeypatch):
    """Tests on a CPU also pass where the machine has a GPU without fp8."""
    check_fp8.cache_clear()
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


NETWORKS = {"ffn": 0.06, "swiglu": 0.07}  # largest relative RMS error of the outputs


def layers(network, **options):
    """A layer in fp8, and one with the same weights that multiplies in fp64."""
    given = {"top_k": 2, "seed": 1, "expert_network": network, **options}
    low = MoELayer(M, E, F, expert_compute="fp8", **given)
    exact = MoELayer(M, E, F, **given).double()
    exact.load_state_dict(low.state_dict())
    return low, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("way", "device"),
    [
        ("torch", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreted),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_rounding_of_rows(way, device, dtype):
    """As e4m3 has 3 bits behind the first, and no value is larger than the row's largest."""
    quantize_rows = importlib.import_module(f"fairseq_tutel.backends.{way}").quantize_rows
    reach = 4 if dtype == torch.float16 else 20
    x = (torch.randn(8, 77) * torch.logspace(-reach, reach, 8)[:, None]).to(device, dtype)
    x[3], x[4, 5], x[5, 76], x[6, 0] = 0, float("nan"), float("inf"), -float("inf")
    got, scale = quantize_rows(x.view(4, 2, 77))
    assert got.dtype == torch.float8_e4m3fn and got.shape == (4, 2, 77) and scale.shape == (4, 2)
    got = fp8.restored_rows(got, scale, torch.float64).view(8, 77)
    assert got[4:7].isnan().all()
    got, x = got[[0, 1, 2, 3, 7]], x[[0, 1, 2, 3, 7]].double()
    assert (got[3] == 0).all()
    largest = x.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(got.abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
    error = (got - x).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, largest / 448 * 2**-10) * 1.001).all()
    assert quantize_rows(x[:0].float())[1].shape == (0,)


def triton(*case):
    return pytest.param(*case, "triton", marks=pytest.mark.interpreted)


@pytest.mark.parametrize(
    ("network", "factor", "top_k", "memory", "way"),
    [
        *((network, factor, 2, "fast", "torch") for network in NETWORKS for factor in (0.0, 1.0)),
        ("ffn", 0.0, 2, "lean", "torch"),
        ("swiglu", 1.0, 1, "minimal", "torch"),
        triton("ffn", 0.0, 2, "fast"),
        triton("swiglu", 1.0, 2, "fast"),
        triton("ffn", 0.0, 1, "minimal"),
        triton("swiglu", 0.0, 2, "minimal"),
    ],
)
def test_error_and_gradients(network, factor, top_k, memory, way, backend):
    """The gradients are of bf16's size of error: they multiply what was not rounded to fp8."""
    backend("torch")
    low, exact = layers(network, capacity_factor=factor, top_k=top_k)
    low.experts.memory = ops.ActivationMemory(memory)
    x = torch.randn(16, M)
    wide = x.double().requires_grad_()
    want = exact(wide)
    d_y = torch.randn_like(x)
    want.backward(d_y.double())
    backend(way)
    x.requires_grad_()
    got = low(x)
    error = rms_ratio(got, want)
    assert 0.02 < error <= NETWORKS[network], error
    got.backward(d_y)
    assert rms_ratio(x.grad, wide.grad) < NETWORKS[network]
    for name, param in low.experts.named_parameters():
        reference = exact.experts.get_parameter(name)
        assert rms_ratio(param.grad, reference.grad) < NETWORKS[network], name
    # fc2's bias sees no product at all
    if network == "ffn":
        bias = low.experts.fc2_bias.grad
        assert_close("fc2_bias", bias, exact.experts.fc2_bias.grad, torch.float32)


def test_one_line_says_that_it_is_emulated(caplog):
    low, _ = layers("ffn")
    with caplog.at_level(logging.WARNING):
        low(torch.randn(4, M))
        low(torch.randn(4, M))
    lines = [record.message for record in caplog.records if "fp8" in record.message]
    assert len(lines) == 1 and "emulated on a CPU" in lines[0]


def pretend(monkeypatch, name, capability):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("capability, hip", [((8, 0), None), ((9, 4), "6.2"), ((9, 0), None)])
def test_a_gpu_without_fp8_is_refused(capability, hip, monkeypatch):
    pretend(monkeypatch, "a GPU", capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", None, raising=False)
    refused = pytest.raises(ValueError, match="needs a Hopper or Blackwell GPU, this is a GPU")
    with contextlib.nullcontext() if capability == (9, 0) else refused:
        check_fp8(torch.device("cuda", 0))


def test_a_layer_is_refused_where_its_weights_are_on_a_gpu_without_fp8(monkeypatch):
    """In the constructor or when it moves there; on the CPU of such a machine fp8 is emulated."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pretend(monkeypatch, "an A100", (8, 0))
    layer, plain = MoELayer(M, E, F, expert_compute="fp8"), MoELayer(M, E, F)
    assert layer(torch.randn(4, M)).isfinite().all()
    with FakeTensorMode(allow_non_fake_inputs=True):
        experts = plain.to_empty(device="cuda").experts
        # as the constructor does, and a move
        for call in (
            lambda: experts.set_up("fp8", experts.memory),
            lambda: layer.to_empty(device="cuda"),
        ):
            with pytest.raises(ValueError, match="needs a Hopper or Blackwell GPU, .* an A100"):
                call()


@pytest.mark.interpreted
@pytest.mark.parametrize("offsets", [None, torch.zeros(E, dtype=torch.int32)], ids=["padded", ""])
def test_a_rank_without_rows_multiplies_nothing_on_a_gpu(offsets, monkeypatch):
    """No kernel of torch is asked; whether it takes no rows is not known."""
    kernels = importlib.import_module("fairseq_tutel.backends.triton.expert_ffn")
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", None, raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.empty((E, 0, M) if offsets is None else (0, M), device="cuda")
        weight = torch.empty(E, F, M, device="cuda")
        assert kernels.linear(rows, weight, offsets, fp8=True).shape == (*rows.shape[:-1], F)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["dropless", "padded"])
@pytest.mark.parametrize("network", NETWORKS)
def test_on_a_gpu(network, factor):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("a GPU without fp8 products of groups")
    low, exact = layers(network, capacity_factor=factor)
    low, exact = low.cuda().bfloat16(), exact.cuda()
    exact.load_state_dict(low.state_dict())
    x = torch.randn(512, M, device="cuda", dtype=torch.bfloat16)
    ops.set_backend("auto")
    assert rms_ratio(low(x), exact(x.double())) <= NETWORKS[network]
