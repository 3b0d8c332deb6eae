"""Gating against its twin in fp64; slots, in both backends, against a loop."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close

from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends import triton as kernels

GATING_SHAPES = [
    pytest.param(37, 5, 2, id="T37-E5-K2"),  # neither is a power of two
    pytest.param(1, 1, 1, id="T1-E1-K1"),  # smallest
    pytest.param(130, 8, 1, id="T130-E8-K1"),  # more blocks than programs
    pytest.param(33, 6, 6, id="T33-E6-K6"),  # every expert chosen
    pytest.param(9, 70, 4, id="T9-E70-K4"),  # one token per tile
    pytest.param(0, 4, 2, id="T0-E4-K2"),  # no tokens
]


def gating_inputs(T, E, with_noise, with_pad, device):
    generator = torch.Generator().manual_seed(T + E)
    logits = 2 * torch.randn(T, E, generator=generator)
    noise = torch.randn(T, E, generator=generator).to(device) if with_noise else None
    pad = (torch.arange(T, device=device) % 3 == 1) if with_pad else None
    return logits.to(device), noise, pad


@pytest.mark.parametrize("with_pad", [False, True], ids=["nopad", "pad"])
@pytest.mark.parametrize("kind", ["plain", "noise_TE", "key_TE"])
@pytest.mark.parametrize(("T", "E", "K"), GATING_SHAPES)
def test_topk_gating(T, E, K, kind, with_pad, device):
    logits, drawn, pad = gating_inputs(T, E, True, with_pad, device)
    given = {} if kind == "plain" else {kind: drawn}
    got = kernels.topk_gating_fwd(logits, K, pad_T=pad, **given)
    given = {name: tensor.double() for name, tensor in given.items()}
    want = torch_backend.topk_gating_fwd(logits.double(), K, pad_T=pad, **given)
    names = ("expert", "gate", "prob_sum", "entropy_sum", "lse", "choice")
    for name, a, b in zip(names, got, want, strict=True):
        if b.dtype == torch.int32:
            assert torch.equal(a, b), name
        else:
            assert a.dtype == torch.float32
            assert_close(name, a, b, torch.float32)
    less = kernels.topk_gating_fwd(logits, K, sums=False)
    assert [each.shape for each in less[2:4]] == [(0,), (0,)]
    if kind == "plain":
        assert torch.equal(less[1], got[1]) and torch.equal(less[4], got[4])


@pytest.mark.parametrize("with_pad", [False, True], ids=["nopad", "pad"])
@pytest.mark.parametrize(("T", "E", "K"), GATING_SHAPES)
def test_topk_gating_gradient(T, E, K, with_pad, device):
    logits, _, pad = gating_inputs(T, E, False, with_pad, device)
    expert, gate, prob_sum, _, lse, choice = kernels.topk_gating_fwd(logits, K, pad_T=pad)
    choice = choice if with_pad else expert
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator).to(device) for t in (gate, prob_sum, lse)]
    got = kernels.topk_gating_bwd(*grads, logits, lse, choice)
    # the expected gradient by autograd of the definition, not by the twin's formula
    logits64 = logits.double().requires_grad_()
    prob = logits64.softmax(1)
    outputs = (prob.gather(1, choice.long()), prob.sum(0), logits64.logsumexp(1))
    torch.autograd.backward(outputs, [g.double() for g in grads])
    assert_close("d_logits", got, logits64.grad, torch.float32)


NAN, INF = float("nan"), float("inf")
BAD_LOGITS = {
    "all disabled": [-INF, -INF, -INF],  # uniform, as at the finite floor
    "two disabled": [-INF, 2.0, -INF],  # all chosen all the same, each once
    "tied": [0.0, 0.0, 0.0],
    "NaN": [1.0, NAN, 0.0],
    "all NaN": [NAN, NAN, NAN],
    "infinite": [0.0, INF, 1.0],
    "far apart": [3e38, -3e38, 0.0],  # the difference overflows; the entropy is 0
}


@pytest.mark.parametrize("name", BAD_LOGITS)
def test_bad_logits_are_treated_as_by_the_twin(name, device):
    logits = torch.tensor([[0.5, -1.0, 2.0], BAD_LOGITS[name]], device=device)
    got = kernels.topk_gating_fwd(logits, 3)
    want = torch_backend.topk_gating_fwd(logits, 3)
    torch.testing.assert_close(got, want, equal_nan=True)
    entropy = got[3]
    assert entropy.isnan().item() == (name in ("NaN", "all NaN", "infinite"))
    if name == "all disabled":
        torch.testing.assert_close(got[1][1].cpu(), torch.full((3,), 1 / 3))
    grads = [torch.ones_like(got[1]), torch.ones(3, device=device), torch.ones(2, device=device)]
    d_got = kernels.topk_gating_bwd(*grads, logits, got[4], got[0])
    d_want = torch_backend.topk_gating_bwd(*grads, logits, want[4], want[0])
    torch.testing.assert_close(d_got, d_want, equal_nan=True)


def expert_choices(T, E, K, kind, device):
    generator = torch.Generator().manual_seed(E)
    scores = torch.rand(T, E, generator=generator)
    expert = scores.argsort(dim=1)[:, :K].to(torch.int32)
    if kind == "one":
        expert[:] = E - 1  # all on one expert; the others are empty
    elif kind == "dropped":
        expert[torch.rand(T, K, generator=generator) < 0.4] = -1
    return expert.to(device)


@pytest.mark.parametrize("with_priority", [False, True], ids=["tokens", "priority"])
@pytest.mark.parametrize("kind", ["spread", "one", "dropped"])
@pytest.mark.parametrize(
    ("T", "E", "K"),
    [
        (53, 7, 2),  # several blocks, the last one partly filled
        (16, 16, 4),  # exactly one block; E a power of two, so the spare bin needs the next one
        (150, 3, 3),  # more blocks than a tile of the scan holds, K = E
        (1, 1, 1),
        (0, 5, 2),
    ],
)
def test_assign_slots(T, E, K, kind, with_priority, device):
    expert = expert_choices(T, E, K, kind, device)
    # few distinct priorities, so that ties occur
    priority = (torch.arange(T, device=device) * 7 % 5).float() if with_priority else None
    want_slot, want_count = naive.assign_slots(expert, E, priority)
    for room in (torch_backend, kernels):
        slot, count = room.assign_slots(expert, E, priority_T=priority)
        assert slot.dtype == count.dtype == torch.int32
        assert slot.tolist() == want_slot and count.tolist() == want_count
