"""Rows on the wire: bytes against the formats' definitions, sizes, errors and extreme values."""

import pytest
import torch
from helpers import naive
from helpers.inputs import decoded

from fairseq_tutel import ops
from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.config import WIRE_FORMATS
from fairseq_tutel.config.formats import BLOCK

SCALED = [name for name, each in WIRE_FORMATS.items() if each.exponent is not None]
# relative error of normal values: the widest are off by half a unit of the mantissa
ERROR = {
    name: 0.217 * torch.finfo(getattr(torch, each.dtype)).eps for name, each in WIRE_FORMATS.items()
}


def awkward_rows(model_dim):
    """Zeros, subnormals, the whole range of fp32, both signs, ties."""
    torch.manual_seed(model_dim)
    rows = torch.randn(9, model_dim)
    rows[1] = 0
    rows[2] *= 1e-39
    rows[3] *= 10.0 ** torch.linspace(-30, 30, model_dim)
    rows[4] = 3e38
    rows[5] = torch.arange(model_dim) / 16  # ties of both formats
    rows[6, 1:] *= 1e-3
    rows[7] = -448.0
    rows[8] = 449.0
    return rows


@pytest.mark.parametrize("wire_format", list(ERROR))
def test_error_and_size(wire_format):
    """One row in two bytes or one per value; the error is the format's, and measured as it is."""
    rows = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    wire, sums = ops.encode_rows(rows, wire_format)
    bytes_of_values = WIRE_FORMATS[wire_format].value_bytes * rows.numel()
    assert bytes_of_values <= wire.numel() < 1.01 * bytes_of_values
    assert (wire.numel() > bytes_of_values) == (wire_format in SCALED)
    arrived = decoded(ops, wire, wire_format, 1024, torch.float32)
    error = ((arrived - rows).square().sum() / rows.square().sum()).sqrt()
    assert 0.9 * ERROR[wire_format] < error < ERROR[wire_format]
    torch.testing.assert_close((sums[0] / sums[1]).sqrt(), error, rtol=1e-5, atol=0)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        wire, _ = ops.encode_rows(rows.to(dtype), wire_format)
        arrived = decoded(ops, wire, wire_format, 1024, dtype)
        assert arrived.dtype == dtype
        error = (arrived - rows).double().norm() / rows.double().norm()
        assert error < ERROR[wire_format] + 2e-3


@pytest.mark.parametrize("model_dim", [1, 5, 128, 200, 259])
@pytest.mark.parametrize("wire_format", [n for n, w in WIRE_FORMATS.items() if w.value_bytes == 1])
def test_bytes_are_those_of_the_definition(wire_format, model_dim):
    rows = awkward_rows(model_dim)
    wire, _ = torch_backend.encode_rows(rows, wire_format)
    want, arrived = naive.encode_rows(rows, getattr(torch, WIRE_FORMATS[wire_format].dtype))
    assert wire.shape[1] == ops.wire_bytes(wire_format, model_dim) == len(want[0])
    assert wire.tolist() == want
    got = decoded(torch_backend, wire, wire_format, model_dim, torch.float32)
    torch.testing.assert_close(got, arrived.float(), rtol=0, atol=0)


TRITON = (("cpu", pytest.mark.interpreted), ("cuda", pytest.mark.gpu))
ROOMS = [("torch", "cpu"), *(pytest.param("triton", where, marks=mark) for where, mark in TRITON)]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # in Triton's interpreter
@pytest.mark.parametrize(("name", "device"), ROOMS)
@pytest.mark.parametrize("wire_format", SCALED)
def test_nothing_overflows_and_what_is_not_finite_stays_so(wire_format, name, device, backend):
    backend(name)
    rows = awkward_rows(300).to(device)
    rows[0, 3], rows[5, 140], rows[7, 299] = float("nan"), float("inf"), -float("inf")
    wire, _ = ops.encode_rows(rows, wire_format)
    got = decoded(ops, wire, wire_format, 300, torch.float32)
    broken = torch.zeros(9, 3, dtype=torch.bool, device=device)
    broken[0, 0] = broken[5, 1] = broken[7, 2] = True
    assert torch.equal(got.isnan(), broken.repeat_interleave(BLOCK, 1)[:, :300])
    assert not got.isinf().any()
    assert not got[1].any()
    _, sums = ops.encode_rows(rows[5:], wire_format)
    assert sums.isfinite().all()  # of what is finite
    for shape in ((0, 8), (3, 0)):
        wire, sums = ops.encode_rows(torch.empty(shape, device=device), wire_format)
        assert wire.shape == (shape[0], ops.wire_bytes(wire_format, shape[1]))
        assert sums.tolist() == [0, 0]
        assert decoded(ops, wire, wire_format, shape[1], torch.float32).shape == shape
    largest = torch.full((2, 4), torch.finfo(torch.float16).max, dtype=torch.float16).to(device)
    wire, _ = ops.encode_rows(largest, wire_format)
    got = decoded(ops, wire, wire_format, 4, torch.float16)
    assert got.isfinite().all() and (got.float() / largest.float() - 1).abs().max() < 0.13


def test_the_error_of_many_rows_is_that_of_some():
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    _, sums = torch_backend.encode_rows(rows, "e4m3")
    assert sums[1] < 0.1 * rows.square().sum()
    assert 0.9 * ERROR["e4m3"] < (sums[0] / sums[1]).sqrt() < 1.02 * ERROR["e4m3"]


def test_rows_of_any_strides():
    """A gradient may be one number in every place."""
    for rows in (torch.randn(128, 6).t(), torch.tensor(3.0).expand(6, 128)):
        for wire_format in ERROR:
            got, _ = torch_backend.encode_rows(rows, wire_format)
            want, _ = torch_backend.encode_rows(rows.contiguous(), wire_format)
            assert torch.equal(got, want)
