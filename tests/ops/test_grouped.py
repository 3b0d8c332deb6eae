"""grouped_linear against a product per expert written out, with gradients."""

import pytest
import torch

from fairseq_tutel import ops


def expected(rows, weight, ends):
    begins = [0, *ends[:-1]]
    return torch.cat([rows[a:b] @ w.t() for a, b, w in zip(begins, ends, weight, strict=True)])


@pytest.mark.parametrize(
    "ends",
    [
        [3, 7, 12],
        [0, 0, 12],  # all rows on one expert
        [5, 5, 9],  # an empty expert, and unused rows at the end
        [0, 0, 0],  # no rows at all
    ],
)
def test_equals_products_per_expert(ends):
    torch.manual_seed(0)
    rows = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor(ends, dtype=torch.int32)
    used = ends[-1]
    out = ops.grouped_linear(rows, weight, offsets)[:used]
    want = expected(rows, weight, ends)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(want)
    got = torch.autograd.grad(out, (rows, weight), grad)
    wanted = torch.autograd.grad(want, (rows, weight), grad)
    torch.testing.assert_close(got[0][:used], wanted[0][:used])
    torch.testing.assert_close(got[1], wanted[1])


def test_gradient_of_the_weight_alone_and_opcheck():
    rows, weight = torch.randn(4, 3), torch.randn(2, 5, 3, requires_grad=True)
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    ops.grouped_linear(rows, weight, offsets).sum().backward()
    torch.testing.assert_close(weight.grad[0, 0], rows[0])
    torch.library.opcheck(torch.ops.fairseq_tutel.grouped_linear, (rows, weight, offsets))


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(4, 3\), \(2, 5, 4\)"):
        ops.grouped_linear(torch.ones(4, 3), torch.ones(2, 5, 4), torch.zeros(2).int())
    with pytest.raises(ValueError, match=r"int32 \[2\]"):
        ops.grouped_linear(torch.ones(4, 3), torch.ones(2, 5, 3), torch.zeros(2))
