"""Gradients of low-rank updates against autograd over every expert's own rows."""

import pytest
import torch
from helpers.assertions import assert_close

from fairseq_tutel import ops
from fairseq_tutel.ops import backend

E, N, INPUTS, OUTPUTS, RANK = 3, 5, 6, 10, 2
ENDS = {"padded": None, "ragged": [4, 4, 9], "empty": [0, 0, 0]}


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("layout", ENDS)
def test_gradients_are_autograds(layout, way, monkeypatch):
    monkeypatch.setattr(backend, "_requested", way)
    dtype = torch.float32 if way == "triton" else torch.float64
    ends = ENDS[layout]
    leading = (E, N) if ends is None else (12,)
    rows, d = torch.randn(*leading, INPUTS).to(dtype), torch.randn(*leading, OUTPUTS).to(dtype)
    a = torch.randn(E, RANK, INPUTS).to(dtype).requires_grad_()
    b = torch.randn(E, OUTPUTS, RANK).to(dtype).requires_grad_()
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    found = ops.low_rank_bwd(d, rows, a.detach(), b.detach(), offsets)
    total = (a * 0).sum() + (b * 0).sum()
    for expert in range(E):
        own = expert if ends is None else slice(([0, *ends])[expert], ends[expert])
        total = total + (rows[own] @ (b[expert] @ a[expert]).t() * d[own]).sum()
    for name, mine, exact in zip("ab", found, torch.autograd.grad(total, (a, b)), strict=True):
        assert_close(name, mine, exact, dtype)
