"""What operators refuse, and with which words."""

import pytest
import torch
from helpers.inputs import random_rows

from fairseq_tutel import ops

ROW, PAIR = random_rows(7, 2, 4, 3, "spread")
EXPERT = torch.zeros(7, 2, dtype=torch.int32)
X, WEIGHT, ROWS = torch.randn(7, 4), torch.rand(7, 2), torch.randn(12, 4)
PARAMS = {"fc1_weight": torch.randn(3, 6, 4), "fc1_bias": torch.randn(3, 6),
          "fc2_weight": torch.randn(3, 4, 6), "fc2_bias": torch.randn(3, 4)}  # fmt: skip


def ffn(**changes):
    given = {"rows": torch.randn(3, 5, 4), **PARAMS, "activation": "gelu", **changes}
    return lambda: ops.expert_ffn(**given)


def routed(x=X, pair=PAIR):
    how = {"options": ops.FFNOptions("gelu", (0.0, 0.0)), "memory": ops.ActivationMemory()}
    args = x, WEIGHT, ROW, pair, EXPERT, *PARAMS.values()
    return lambda: ops.routed_ffn(*args, offsets=torch.tensor([3, 3, 9]).int(), **how)


REFUSED = [
    (ffn(activation="sigmoid"), "sigmoid"),
    (ffn(dropout_p=1.0), "dropout_p must be in"),
    (ffn(rows=torch.randn(3, 5, 5)), r"\(experts, rows, 4\)"),
    (ffn(fc2_bias=torch.randn(3, 6)), r"fc2_bias must be \(3, 4\), got \(3, 6\)"),
    (ffn(offsets=torch.tensor([1, 2, 3])), "with offsets True"),
    (routed(x=X[:-1]), r"x must be \(7, model_dim\)"),
    (routed(pair=PAIR.long()), "src_pair must be"),
    (lambda: ops.combine(ROWS, ROW, PAIR, WEIGHT, torch.randn(4, 4), EXPERT[:-1]),
     r"expert must be \(7, 2\), got \(6, 2\)"),
    (lambda: ops.dispatch(X.to("meta"), ROW, PAIR),
     "dispatch got tensors on meta, cpu, cpu: give the meta"),
    (lambda: ops.gate_logits(X, torch.randn(4, 6)), r"\(7, 4\)"),
    (lambda: ops.gate_logits(X, torch.randn(4, 4).double()), "float64"),
    (lambda: ops.gate_logits(X, torch.randn(4, 4).half()), "float16"),
    (lambda: ops.encode_rows(X, "fp4"), "unknown wire format 'fp4'; one of bf16, fp16, e4m3"),
    (lambda: ops.encode_rows(X.long(), "bf16"), r"rows must be .* got \(7, 4\) torch.int64"),
    (lambda: ops.decode_rows(torch.zeros(7, 4, dtype=torch.uint8), "e4m3", X),
     r"\(7, 4\) are \(7, 8\) uint8 as e4m3, got \(7, 4\) "),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_what_has_no_values_at_all_is_taken():
    assert ops.dispatch(*(each.to("meta") for each in (X, ROW, PAIR))).is_meta


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
    with pytest.raises(error, match=words):
        transform(lambda x: ops.dispatch(x, ROW, PAIR), X)
