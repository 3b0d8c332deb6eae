"""The gate's product on a CPU: equal to a plain product, gradients, registration, refusals."""

import pytest
import torch
from helpers.assertions import assert_close
from torch.autograd import gradcheck

from fairseq_tutel import ops
from fairseq_tutel.backends.torch import gate_logits as module
from fairseq_tutel.moe import MoEConfig, make_router


def tensors(T, M=6, E=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(T)
    shapes = ((T, M), (E, M))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 21])  # none, one block, its edge, several blocks
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_a_product(tokens, threads, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_TOKENS", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, w = tensors(tokens)
        d = torch.randn(tokens, 4, dtype=torch.float64)
        want = x @ w.t()
        got = ops.gate_logits(x, w)
        assert_close("logits", got, want, torch.float64)
        wanted, found = (torch.autograd.grad(y, (x, w), d) for y in (want, got))
    finally:
        torch.set_num_threads(before)
    for name, a, b in zip(("x", "w"), found, wanted, strict=True):
        assert_close(name, a, b, torch.float64)


def test_gradcheck_and_frozen_arguments():
    x, w = tensors(5)
    assert gradcheck(ops.gate_logits, (x, w))
    assert gradcheck(lambda x: ops.gate_logits(x, w.detach()), x)
    assert gradcheck(lambda w: ops.gate_logits(x.detach(), w), w)


def test_opcheck():
    args = tensors(5, dtype=torch.float32)
    torch.library.opcheck(torch.ops.fairseq_tutel.gate_logits.default, args)
    d, (x, w) = torch.randn(5, 4), (t.detach() for t in args)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.fairseq_tutel.gate_logits_bwd.default, (d, x, w, *needs))


def test_the_linear_gate_uses_it(monkeypatch):
    linear = make_router(6, MoEConfig(num_experts=4))
    x = torch.randn(9, 6)
    seen = []
    original = ops.gate_logits
    monkeypatch.setattr(ops, "gate_logits", lambda *a: seen.append(1) or original(*a))
    torch.testing.assert_close(linear.logits(x), linear.wg(x))
    monkeypatch.setattr(ops, "on_cpu_threads", lambda device: False)
    linear.logits(x)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("x", "w", "said"),
    [
        (torch.randn(3, 5), torch.randn(4, 6), r"\(3, 5\)"),
        (torch.randn(3, 6), torch.randn(4, 6).double(), "float64"),
        (torch.randn(3, 6, device="meta"), torch.randn(4, 6, device="meta"), "meta"),
    ],
)
def test_mistakes(x, w, said):
    with pytest.raises(ValueError, match=said):
        ops.gate_logits(x, w)
