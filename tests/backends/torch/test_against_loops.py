"""Edges, activations and errors of the torch backend; definitions: test_kernels.py."""

import pytest
import torch

from fairseq_tutel import ops
from fairseq_tutel.backends import torch as torch_backend


def fairseq_activation(name):
    if name == "linear":
        return lambda x: x
    if name in ("silu", "swish"):  # here fairseq returns the class of a module
        return torch.nn.functional.silu
    from fairseq import utils

    return utils.get_activation_fn(name.replace("gelu_fast", "gelu_accurate"))


@pytest.mark.parametrize("activation", sorted(torch_backend.ACTIVATIONS))
def test_activations_are_fairseqs(activation):
    pytest.importorskip("fairseq")
    z = torch.randn(7, 13, requires_grad=True)
    want, dy = fairseq_activation(activation)(z), torch.randn(7, 13)
    forward, gradient = torch_backend.ACTIVATIONS[activation]
    torch.testing.assert_close(forward(z.detach(), torch.empty(7, 13)), want)
    (d_want,) = torch.autograd.grad(want, z, dy)
    torch.testing.assert_close(gradient(dy, z.detach(), dy), d_want)  # in place


def test_tokens_of_a_map_with_other_strides():
    """A router may put its choices side by side."""
    row = torch.stack([torch.tensor([0, -1, 2]), torch.tensor([1, 3, -1])]).int().t()
    rows, weight = torch.randn(4, 5), torch.rand(3, 2)
    pair = torch.tensor([0, 1, 4, 3], dtype=torch.int32)
    want = torch.stack([weight[0] @ rows[:2], weight[1, 1] * rows[3], weight[2, 0] * rows[2]])
    torch.testing.assert_close(ops.combine(rows, row, pair, weight), want)


def test_errors_name_the_values():
    row = torch.zeros(4, 2, dtype=torch.int32)
    pair = torch.zeros(8, dtype=torch.int32)
    x = torch.zeros(4, 3)
    as_is = {"capacity": None, "padded": False, "normalize": False}
    both = {"priority_T": x[:, 0], "slots": (row, row[:2, :1].expand(2, 3))}
    cases = [
        ("top_k must be between 1 and 3 experts, got 4", lambda: ops.topk_gating(x, 4)),
        ("got 0", lambda: ops.topk_gating(x, 0)),
        ("logits must be", lambda: ops.topk_gating(x[0], 1)),
        ("noise", lambda: ops.topk_gating(x, 1, noise_TE=x[:2])),
        ("pad", lambda: ops.topk_gating(x, 1, pad_T=torch.zeros(3, dtype=torch.bool))),
        ("int32", lambda: ops.assign_slots(row.long(), 3)),
        ("priority", lambda: ops.assign_slots(row, 3, priority_T=torch.zeros(5))),
        ("slots have their order", lambda: ops.assign_rows(row, x[:, :2], 3, **both, **as_is)),
        ("x must be", lambda: ops.dispatch(x[:3], row, pair)),
        ("topk_weight", lambda: ops.combine(torch.zeros(8, 3), row, pair, torch.zeros(4, 3))),
        ("src_pair must be", lambda: ops.dispatch(x, row, pair.long())),
        (r"rows must be \(8, model_dim\)", lambda: ops.combine(x, row, pair, torch.zeros(4, 2))),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
