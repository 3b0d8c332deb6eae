"""Experts whose forward pass multiplies in fp8: rounding, devices. Numbers: test_product.py."""

import contextlib
import importlib

import pytest
import torch
from helpers.assertions import rms_ratio
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_tutel.backends import _fp8 as fp8
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops.fp8 import check_fp8

M, F, E = 32, 64, 4
GPU = pytest.mark.gpu
WAYS = [("torch", "cpu"), pytest.param("triton", "cpu", marks=pytest.mark.interpreted)]


@pytest.fixture(autouse=True)
def emulated(request, monkeypatch):
    """Tests on a CPU also pass where the machine has a GPU without fp8."""
    check_fp8.cache_clear()
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("way", "device"), [*WAYS, pytest.param("triton", "cuda", marks=GPU)])
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
        refused = "needs a Hopper or Blackwell GPU, .* an A100"
        with pytest.raises(ValueError, match=refused):
            experts.set_up("fp8", experts.memory)
        with pytest.raises(ValueError, match=refused):
            layer.to_empty(device="cuda")


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


@GPU
@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["dropless", "padded"])
@pytest.mark.parametrize("network", ["ffn", "swiglu"])
def test_on_a_gpu(network, factor):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("a GPU without fp8 products of groups")
    given = {"seed": 1, "expert_network": network, "capacity_factor": factor}
    low = MoELayer(M, E, F, expert_compute="fp8", **given).cuda().bfloat16()
    exact = MoELayer(M, E, F, **given).double().cuda()
    exact.load_state_dict(low.state_dict())
    x = torch.randn(512, M, device="cuda", dtype=torch.bfloat16)
    assert rms_ratio(low(x), exact(x.double())) <= 0.07
