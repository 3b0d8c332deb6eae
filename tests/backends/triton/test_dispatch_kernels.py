"""Dispatch and combine: kernels and torch against loops in fp64, outputs and gradients."""

import itertools

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close
from helpers.inputs import random_rows

from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends import triton as kernels

CASES = {
    "T37-K2-M70-capacity": (37, 2, 5, 16, 70, "spread"),  # M is no power of two
    "T16-K1-M32-overflow": (16, 1, 4, 3, 32, "spread"),  # drops; M = one tile
    "T11-K4=E": (11, 4, 4, 11, 33, "spread"),  # top-k = all experts
    "T9-K6": (9, 6, 7, 5, 33, "spread"),  # more choices than are unrolled
    "M1": (13, 2, 4, 9, 1, "spread"),  # narrowest row
    "one-expert": (10, 2, 6, 20, 40, "one"),  # the other experts stay empty
    "all-dropped": (6, 3, 3, 4, 17, "dropped"),  # every pair dropped
    "T0": (0, 2, 3, 4, 17, "spread"),  # no tokens: all rows unused
    "R0": (5, 2, 3, 0, 17, "dropped"),  # no rows
}
HALVES = [torch.float16, torch.bfloat16]
# every shape in fp32, two in the halves
TYPED = pytest.mark.parametrize(
    ("dtype", "case"),
    [*itertools.product([torch.float32], CASES), *itertools.product(HALVES, list(CASES)[:2])],
)
ROOMS = pytest.mark.parametrize("room", [torch_backend, kernels], ids=["torch", "triton"])


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


@ROOMS
@TYPED
def test_dispatch(case, dtype, room, device):
    row, pair, x, _, _, d_rows, _ = make(*CASES[case], dtype, device)
    rows = room.dispatch_fwd(x, row, pair)
    assert rows.dtype == dtype
    assert torch.equal(rows, naive.dispatch(x, row, pair))

    d_x = room.dispatch_bwd(d_rows, row)
    assert d_x.dtype == dtype
    ones = torch.ones(row.shape, device=device)
    assert_close("d_x", d_x, naive.combine(d_rows.double(), row, ones), dtype)


@ROOMS
@pytest.mark.parametrize("biased", [False, True])
@TYPED
def test_combine(case, dtype, biased, room, device):
    _, _, E, C, M, _ = CASES[case]
    row, pair, _, dy, rows, _, weight = make(*CASES[case], dtype, device)
    exact, given = [rows.double(), weight.double()], ()
    if biased:
        expert = torch.where(row < 0, -1, row // max(C, 1)).int()
        bias = torch.randn(E, M, generator=torch.Generator().manual_seed(4)).to(dtype).to(device)
        exact, given = [*exact, bias.double()], (bias, expert)
    exact = [tensor.requires_grad_() for tensor in exact]
    want = naive.combine(exact[0], row, *exact[1:], *given[1:])
    grads = [torch.zeros_like(leaf) for leaf in exact]
    if (row >= 0).any():
        grads = torch.autograd.grad(want, exact, dy.double())
    weight[row < 0] = float("nan")  # the weight of a dropped pair must not matter either

    y = room.combine_fwd(rows, row, weight, *given)
    assert y.dtype == dtype
    assert_close("y", y, want, dtype)
    found = room.combine_bwd(dy, rows, row, pair, weight, *given)
    dtypes = [dtype, torch.float32, dtype][: len(exact)]
    assert [each.dtype for each in found[: len(exact)]] == dtypes
    assert (found[0][pair < 0] == 0).all() and (found[1][row < 0] == 0).all()
    for name, got, exact_grad in zip(("d_rows", "d_weight", "d_bias"), found, grads, strict=False):
        assert_close(name, got, exact_grad, torch.float32 if name == "d_weight" else dtype)


def test_only_needed_gradients_are_computed(device):
    row, pair, _, dy, rows, _, weight = make(7, 2, 3, 5, 20, "spread", torch.float32, device)
    both = kernels.combine_bwd(dy, rows, row, pair, weight)
    only_rows = kernels.combine_bwd(dy, rows, row, pair, weight, needs_weight=False)
    only_weight = kernels.combine_bwd(dy, rows, row, pair, weight, needs_rows=False)
    assert torch.equal(only_rows[0], both[0]) and only_rows[1].shape == (0,)
    assert torch.equal(only_weight[1], both[1]) and only_weight[0].shape == (0,)
