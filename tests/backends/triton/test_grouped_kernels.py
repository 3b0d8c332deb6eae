"""Products of ragged rows: kernels and torch against a product per expert."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close

from fairseq_tutel.backends.torch import _grouped as torch_grouped
from fairseq_tutel.backends.triton import _grouped as kernels

ENDS = {
    "uneven": [3, 30, 41, 57],
    "all on one": [0, 0, 57, 57],
    "an empty expert and unused rows": [20, 20, 33, 40],
    "no rows at all": [0, 0, 0, 0],
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
R, A, B = 57, 33, 20  # no multiples of a tile


def make(ends, dtype, device):
    generator = torch.Generator().manual_seed(1)
    shapes = ((R, A), (4, A, B), (R, B))
    made = [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]
    made[0][ends[-1] :] = float("nan")  # rows of nobody may hold anything
    made[2][ends[-1] :] = float("nan")
    return *made, torch.tensor(ends, dtype=torch.int32, device=device)


@pytest.mark.parametrize("room", [torch_grouped, kernels], ids=["torch", "triton"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_rows_product(ends, dtype, transposed, room, device):
    rows, weight, _, offsets = make(ends, dtype, device)
    if transposed:  # as in the forward pass, which multiplies by the transposed weight
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    used = ends[-1]
    got = room.rows_product(rows, weight, offsets)[:used]
    assert got.dtype == dtype
    want = naive.rows_product(rows.double(), weight.double(), ends)
    assert_close("out", got, want[:used], dtype)


@pytest.mark.parametrize("room", [torch_grouped, kernels], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_weight_gradient(ends, dtype, room, device):
    d, _, rows, offsets = make(ends, dtype, device)
    got = room.weight_gradient(d, rows, offsets)
    assert got.dtype == dtype and got.is_contiguous()
    assert_close("out", got, naive.weight_gradient(d.double(), rows.double(), ends), dtype)


def test_strided_rows_and_offsets(device):
    rows, weight, other, offsets = make([3, 30, 41, 57], torch.float32, device)
    strided = rows.t().contiguous().t(), offsets.repeat_interleave(2)[::2]
    want = kernels.rows_product(rows, weight, offsets)
    assert torch.equal(kernels.rows_product(strided[0], weight, strided[1]), want)
    want = kernels.weight_gradient(rows, other, offsets)
    assert torch.equal(kernels.weight_gradient(strided[0], other, strided[1]), want)


@pytest.mark.skipif(not kernels._HAS_GROUPED_MM, reason="a torch without grouped_mm")
def test_torchs_grouped_product_takes_what_it_is_given(monkeypatch):
    """Where it is one kernel; its CPU implementation checks shapes, layouts and results."""
    monkeypatch.setattr(kernels, "_grouped_mm_is_fused", lambda rows, *widths: True)
    ends = [8, 24, 24, 48]
    generator = torch.Generator().manual_seed(1)
    shapes = ((48, 16), (4, 16, 32), (48, 32))
    rows, weight, d = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    offsets = torch.tensor(ends, dtype=torch.int32)
    for w in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        want = naive.rows_product(rows.double(), w.double(), ends)
        assert_close("out", kernels.rows_product(rows, w, offsets), want, torch.bfloat16)
    got = kernels.weight_gradient(d, rows, offsets)
    assert got.is_contiguous()
    want = naive.weight_gradient(d.double(), rows.double(), ends)
    assert_close("gradient", got, want, torch.bfloat16)


def test_wrong_arguments_are_named(device):
    rows, weight, other, offsets = make([3, 30, 41, 57], torch.float32, device)
    with pytest.raises(ValueError, match=r"weight must have shape \(4, 33, 20\)"):
        kernels.rows_product(rows, weight[:, :32], offsets)
    with pytest.raises(ValueError, match="weight must be one of torch.float32"):
        kernels.rows_product(rows, weight.half(), offsets)
    with pytest.raises(ValueError, match="offsets must be one of torch.int32"):
        kernels.weight_gradient(rows, other, offsets.long())
