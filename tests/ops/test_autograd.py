"""Gradients of the operators: gradcheck in fp64, and what is computed when."""

import pytest
import torch
from helpers.inputs import random_rows
from torch.autograd import gradcheck

from fairseq_tutel import ops


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


ROWS = [(7, 2, 4, 3, "spread"), (3, 2, 3, 2, "dropped"), (0, 2, 3, 2, "spread")]


@pytest.mark.parametrize(("T", "K", "E", "C", "kind"), ROWS)
def test_dispatch_and_combine(T, K, E, C, kind):
    row, pair = random_rows(T, K, E, C, kind)
    assert gradcheck(lambda x: ops.dispatch(x, row, pair), random(T, 5))
    rows, weight = random(E * C, 5), random(T, K)
    assert gradcheck(lambda r, w: ops.combine(r, row, pair, w), (rows, weight))
    assert gradcheck(lambda r: ops.combine(r, row, pair, weight.detach()), rows)
    assert gradcheck(lambda w: ops.combine(rows.detach(), row, pair, w), weight)
    biases, expert = random(E, 5), torch.where(row < 0, -1, row // C).int()
    leaves = rows, weight, biases
    assert gradcheck(lambda r, w, b: ops.combine(r, row, pair, w, b, expert), leaves)
    assert gradcheck(
        lambda b: ops.combine(rows.detach(), row, pair, weight.detach(), b, expert), biases
    )


@pytest.mark.parametrize("used", [1, 2, 4])
def test_gating_of_which_one_output_is_used(used):
    assert gradcheck(lambda logits: ops.topk_gating(logits, 2)[used], random(5, 4))
    flags = [output.requires_grad for output in ops.topk_gating(random(4, 3), 2)]
    assert flags == [False, True, True, False, True]  # not of indices and entropy


def test_dispatch_does_not_keep_the_tokens():
    row, pair = random_rows(7, 2, 4, 3, "spread")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.dispatch(random(7, 5), row, pair)
    assert not [t for t in kept if t.is_floating_point()]


def forward_dual(call, x):
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def second_derivative(call, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((call(x) ** 2).sum(), x, create_graph=True)
    grad.sum().backward()


# the tangent that torch makes of an operator without a formula is zero
FORWARD = NotImplementedError, "fairseq_tutel::dispatch .*jacobian"
TRANSFORMS = {
    "jvp": (lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)), *FORWARD),
    "jacfwd": (lambda call, x: torch.func.jacfwd(call)(x), *FORWARD),
    "dual": (forward_dual, *FORWARD),
    "vjp": (torch.func.vjp, RuntimeError, "to use .* with functorch transforms"),  # torch's own
    "second derivative": (second_derivative, RuntimeError, "dispatch_bwd.* no autograd formula"),
}


@pytest.mark.parametrize("transform, error, words", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_without_a_formula_are_refused(transform, error, words):
    maps = random_rows(3, 2, 3, 2, "spread")
    with pytest.raises(error, match=words):
        transform(lambda x: ops.dispatch(x, *maps), random(3, 4).detach())
