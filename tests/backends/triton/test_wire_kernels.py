"""Rows on the wire: the kernels make the bytes that torch makes."""

import pytest
import torch
from helpers.inputs import decoded

from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends import triton as kernels
from fairseq_tutel.config import WIRE_FORMATS


def awkward_rows(num_rows, model_dim, dtype):
    torch.manual_seed(num_rows + model_dim)
    rows = torch.randn(num_rows, model_dim)
    rows[::4] *= 10.0 ** torch.linspace(-6, 4, model_dim)
    rows[1::4] = torch.arange(model_dim) / 16
    rows[2::8] = 0
    rows[3::8] = torch.finfo(dtype).max
    return rows.to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (5, 200), (11, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_same_bytes_and_numbers(wire_format, dtype, shape, device):
    rows = awkward_rows(*shape, dtype)
    want, want_sums = torch_backend.encode_rows(rows, wire_format)
    got, sums = kernels.encode_rows(rows.to(device), wire_format)
    if wire_format == "bf16" and dtype != torch.bfloat16 and device.type == "cpu":
        # the interpreter does not round to the nearest bf16
        got, want = got.view(torch.int16), want.view(torch.int16)
        assert (got.int() - want.int()).abs().max() <= 1
        return
    assert torch.equal(got.cpu(), want)
    if dtype == torch.float16:  # the squares of the largest numbers of others are infinite
        torch.testing.assert_close(sums.cpu(), want_sums, rtol=1e-4, atol=1e-30)
    for to in (torch.float32, torch.float16, torch.bfloat16):
        if to == torch.bfloat16 and wire_format == "fp16" and device.type == "cpu":
            continue  # as above
        back = decoded(kernels, got, wire_format, shape[1], to).cpu()
        torch.testing.assert_close(
            back, decoded(torch_backend, want, wire_format, shape[1], to), rtol=0, atol=0
        )
