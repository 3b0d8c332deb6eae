"""Tensors of more than 2^31 elements on a GPU: the last rows must be right."""

import pytest
import torch

from fairseq_tutel.backends import triton as kernels
from fairseq_tutel.backends.triton import _grouped

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DIM = 1024
ROWS = 2**31 // DIM + 3


@pytest.fixture
def poisoned_memory():
    """No poison here: the conftest's would touch every byte of the large tensors first."""


@pytest.fixture
def cuda():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("less than 24 GiB of free GPU memory")
    yield torch.device("cuda")
    torch.cuda.empty_cache()


def test_dispatch_and_combine(cuda):
    tokens = torch.tensor([0, 1, 2], device=cuda)
    row = torch.tensor([[0], [ROWS - 1], [ROWS // 2]], dtype=torch.int32, device=cuda)
    x = torch.randn(3, DIM, dtype=torch.float16, device=cuda)
    weight = torch.full((3, 1), 2.0, device=cuda)
    pair = torch.full((ROWS,), -1, dtype=torch.int32, device=cuda)
    pair[row[:, 0].long()] = torch.arange(3, dtype=torch.int32, device=cuda)
    rows = kernels.dispatch_fwd(x, row, pair)
    assert torch.equal(rows[row[:, 0].long()], x[tokens])
    assert rows[1].eq(0).all() and rows[-2].eq(0).all()
    assert torch.equal(kernels.combine_fwd(rows, row, weight), 2 * x)
    d_rows, d_weight, _ = kernels.combine_bwd(x, rows, row, pair, weight)
    assert torch.equal(d_rows[row[:, 0].long()], 2 * x)
    want = x.double().square().sum(1, keepdim=True)
    torch.testing.assert_close(d_weight.double(), want, rtol=1e-5, atol=0)


def test_bias_act(cuda):
    h = torch.zeros(1, ROWS, DIM, dtype=torch.float16, device=cuda)
    h[0, -1] = torch.randn(DIM, device=cuda)
    bias = torch.ones(1, DIM, dtype=torch.float16, device=cuda)
    y = kernels.bias_act_fwd(h, bias, activation="relu")
    assert torch.equal(y[0, -1], (h[0, -1].float() + 1).relu().half()) and (y[0, -2] == 1).all()
    d_h, _ = kernels.bias_act_bwd(y, h, bias, activation="linear")
    assert torch.equal(d_h[0, -1], y[0, -1])


def test_products(cuda):
    """More tiles of rows than a grid's second dimension may have: 65,535."""
    rows = torch.zeros(2**23, 16, dtype=torch.float16, device=cuda)
    rows[-1] = torch.randn(16, device=cuda)
    weight = torch.randn(2, 16, 256, dtype=torch.float16, device=cuda)
    offsets = torch.tensor([7, len(rows)], dtype=torch.int32, device=cuda)
    out = _grouped.rows_product(rows, weight, offsets)
    want = rows[-1].double() @ weight[1].double()
    torch.testing.assert_close(out[-1].double(), want, rtol=1e-2, atol=1e-2)
    assert not out[:-1].any()
    got = _grouped.weight_gradient(rows, out, offsets)
    want = rows[-1].double()[:, None] * out[-1].double()
    torch.testing.assert_close(got[1].double(), want, rtol=1e-2, atol=1e-2)
    assert not got[0].any()
