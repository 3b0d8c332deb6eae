"""Dispatch and combine: kernels against loops in fp64, outputs and gradients."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close
from helpers.inputs import random_rows

from fairseq_tutel.backends import triton as kernels

CASES = [
    pytest.param(37, 2, 5, 16, 70, "spread", id="T37-K2-M70-capacity"),  # M is no power of two
    pytest.param(16, 1, 4, 3, 32, "spread", id="T16-K1-M32-overflow"),  # drops; M = one tile
    pytest.param(11, 4, 4, 11, 33, "spread", id="T11-K4=E"),  # top-k = all experts
    pytest.param(9, 6, 7, 5, 33, "spread", id="T9-K6"),  # more choices than are unrolled
    pytest.param(13, 2, 4, 9, 1, "spread", id="M1"),  # narrowest row
    pytest.param(10, 2, 6, 20, 40, "one", id="one-expert"),  # the other experts stay empty
    pytest.param(6, 3, 3, 4, 17, "dropped", id="all-dropped"),  # every pair dropped
    pytest.param(0, 2, 3, 4, 17, "spread", id="T0"),  # no tokens: all rows unused
    pytest.param(5, 2, 3, 0, 17, "dropped", id="R0"),  # no rows
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(T, K, E, C, M, kind, dtype, device):
    row, pair = random_rows(T, K, E, C, kind)
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(T, M, generator=generator).to(dtype) for _ in range(2))
    rows, d_rows = (torch.randn(E * C, M, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(T, K, generator=generator)
    # what lies in rows that nobody uses must not matter
    rows[pair < 0] = float("nan")
    d_rows[pair < 0] = float("nan")
    return [t.to(device) for t in (row, pair, x, dy, rows, d_rows, weight)]


def double(*tensors):
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "K", "E", "C", "M", "kind"), CASES)
def test_dispatch(T, K, E, C, M, kind, dtype, device):
    row, pair, x, _, _, d_rows, _ = make(T, K, E, C, M, kind, dtype, device)
    rows = kernels.dispatch_fwd(x, row, pair)
    assert rows.dtype == dtype
    assert torch.equal(rows, naive.dispatch(x, row, pair))

    d_x = kernels.dispatch_bwd(d_rows, row)
    assert d_x.dtype == dtype
    ones = torch.ones(row.shape, device=device)
    assert_close("d_x", d_x, naive.combine(d_rows.double(), row, ones), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "K", "E", "C", "M", "kind"), CASES)
def test_combine(T, K, E, C, M, kind, dtype, device):
    row, pair, _, dy, rows, _, weight = make(T, K, E, C, M, kind, dtype, device)
    weight[row < 0] = float("nan")  # the weight of a dropped pair must not matter either
    clean = weight.nan_to_num()
    dy64, rows64, weight64 = double(dy, rows, clean)

    y = kernels.combine_fwd(rows, row, weight)
    assert y.dtype == dtype
    assert_close("y", y, naive.combine(rows64, row, weight64), dtype)

    d_rows, d_weight = kernels.combine_bwd(dy, rows, row, pair, weight)
    want_rows, want_weight = naive.combine_bwd(dy64, rows64, row, weight64)
    assert d_rows.dtype == dtype and d_weight.dtype == torch.float32
    assert (d_rows[pair < 0] == 0).all()
    assert (d_weight[row < 0] == 0).all()
    assert_close("d_rows", d_rows, want_rows, dtype)
    assert_close("d_weight", d_weight, want_weight, torch.float32)


def test_only_needed_gradients_are_computed(device):
    row, pair, _, dy, rows, _, weight = make(7, 2, 3, 5, 20, "spread", torch.float32, device)
    both = kernels.combine_bwd(dy, rows, row, pair, weight)
    only_rows = kernels.combine_bwd(dy, rows, row, pair, weight, needs_weight=False)
    only_weight = kernels.combine_bwd(dy, rows, row, pair, weight, needs_rows=False)
    assert torch.equal(only_rows[0], both[0]) and only_rows[1].shape == (0,)
    assert torch.equal(only_weight[1], both[1]) and only_weight[0].shape == (0,)


def test_strided_inputs(device):
    row, pair, x, _, rows, _, weight = make(9, 2, 3, 7, 24, "spread", torch.float32, device)
    strided = row.t().contiguous().t()
    want = kernels.dispatch_fwd(x, row, pair)
    assert torch.equal(kernels.dispatch_fwd(x.t().contiguous().t(), strided, pair), want)
    want = kernels.combine_fwd(rows, row, weight)
    got = kernels.combine_fwd(rows.t().contiguous().t(), strided, weight.t().contiguous().t())
    assert torch.equal(got, want)
    # the gradient of a sum is an expanded scalar
    ones = torch.ones((), device=device).expand(9, 24)
    want = kernels.combine_bwd(ones.contiguous(), rows, row, pair, weight)
    got = kernels.combine_bwd(ones, rows, row, pair, weight)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_dispatch_then_combine_is_the_identity(device):
    row, pair, x, *_ = make(21, 1, 4, 21, 45, "spread", torch.float16, device)
    rows = kernels.dispatch_fwd(x, row, pair)
    one = torch.ones(21, 1, device=device)
    assert torch.equal(kernels.combine_fwd(rows, row, one), x)


def test_wrong_arguments_are_named(device):
    row, pair, x, _, rows, _, weight = make(4, 2, 2, 4, 8, "spread", torch.float32, device)
    with pytest.raises(ValueError, match=r"tokens must be one of.*got torch.float64"):
        kernels.dispatch_fwd(x.double(), row, pair)
    with pytest.raises(ValueError, match=r"rows must have shape \(8, 8\), got \(7, 8\)"):
        kernels.combine_bwd(x, rows[:7], row, pair, weight)
    with pytest.raises(ValueError, match="at least 1, got 0 and 2"):
        kernels.dispatch_fwd(x[:, :0], row, pair)
