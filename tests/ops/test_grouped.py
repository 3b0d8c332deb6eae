"""Products of each expert's own rows, against a loop."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close

from fairseq_tutel import ops


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("ragged", [False, True])
def test_products_are_those_of_a_loop(ragged, way, backend):
    backend(way)
    ends = [3, 3, 8] if ragged else [4, 8, 12]
    offsets = torch.tensor(ends, dtype=torch.int32)
    rows, d, weight = torch.randn(12, 16), torch.randn(12, 8), torch.randn(3, 16, 8)
    want = naive.rows_product(rows, weight, ends)[: ends[-1]]
    d_want = naive.weight_gradient(d, rows, ends)
    if not ragged:
        rows, d, offsets = rows.view(3, 4, 16), d.view(3, 4, 8), None
    out = ops.rows_product(rows, weight, offsets).reshape(-1, 8)
    assert_close("product", out[: ends[-1]], want, torch.float32)
    assert_close("gradient", ops.weight_gradient(d, rows, offsets), d_want, torch.float32)
