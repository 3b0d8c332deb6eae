"""Products of each expert's own rows, against a loop."""

import pytest
import torch
from helpers.assertions import assert_close

from fairseq_tutel import ops


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("ragged", [False, True])
def test_products_are_those_of_a_loop(ragged, way, backend):
    backend(way)
    counts = [3, 0, 5] if ragged else [4, 4, 4]
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows, d, weight = torch.randn(12, 16), torch.randn(12, 8), torch.randn(3, 16, 8)
    parts = list(zip(rows.split([*counts, 12 - sum(counts)]), weight, strict=False))
    want = torch.cat([part @ each for part, each in parts])
    d_want = torch.stack(
        [a.t() @ b for (b, _), a in zip(parts, d.split([*counts, 12 - sum(counts)]), strict=False)]
    )
    if not ragged:
        rows, d, offsets = rows.view(3, 4, 16), d.view(3, 4, 8), None
    out = ops.rows_product(rows, weight, offsets).reshape(-1, 8)
    assert_close("product", out[: sum(counts)], want, torch.float32)
    assert_close("gradient", ops.weight_gradient(d, rows, offsets), d_want, torch.float32)
