"""Products of ragged rows: kernels against a product per expert."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_equals_a_product_per_expert(ends, dtype, device):
    rows, weight, other, offsets = make(ends, dtype, device)
    used = ends[-1]
    want = naive.rows_product(rows.double(), weight.double(), ends)[:used]
    # plain, and transposed as in the forward pass, which multiplies by the transposed weight
    for given in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        got = kernels.rows_product(rows, given, offsets)[:used]
        assert got.dtype == dtype
        assert_close("product", got, want, dtype)
    got = kernels.weight_gradient(rows, other, offsets)
    assert got.dtype == dtype and got.is_contiguous()
    want = naive.weight_gradient(rows.double(), other.double(), ends)
    assert_close("gradient", got, want, dtype)


@pytest.mark.interpreted
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


def test_experts_without_rows_have_zero_gradients_on_blackwell(device, monkeypatch):
    """grouped_mm leaves their part of the result unwritten there."""

    def leaves_unused(d_t, rows, offs):
        out = torch.full((len(offs), d_t.shape[0], rows.shape[1]), float("nan"), dtype=rows.dtype)
        out = out.to(rows.device)
        for expert, (begin, end) in enumerate(zip([0, *offs[:-1]], offs, strict=True)):
            if begin < end:
                out[expert] = d_t[:, begin:end] @ rows[begin:end]
        return out

    monkeypatch.setattr(kernels, "_grouped_mm_is_fused", lambda rows, *widths: True)
    monkeypatch.setattr(kernels, "_grouped_mm_skips_unused", lambda rows: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_unused, raising=False)
    for ends in ENDS.values():
        rows, _, other, offsets = make(ends, torch.float32, device)
        got = kernels.weight_gradient(rows, other, offsets)
        want = naive.weight_gradient(rows.double(), other.double(), ends)
        assert_close("gradient", got, want, torch.float32)


def test_more_tiles_than_a_grids_second_dimension_may_have(monkeypatch):
    """2^23 rows in tiles of 16: all programs are in the first dimension."""
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **kw: grids.append(grid))
    # no torch.device("meta") here: torch remembers its constructors, which are poisoned
    rows, weight = (torch.empty(s, device="meta") for s in ((2**23, 8), (2, 8, 40)))
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    monkeypatch.setattr(kernels, "check_tensor", lambda *args: None)
    kernels.rows_product(rows, weight, offsets)
    assert grids[0]({"BLOCK_R": 16, "BLOCK_C": 16}) == ((2**19 + 3) * 3,)
