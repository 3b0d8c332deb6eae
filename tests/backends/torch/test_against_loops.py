"""The torch twins against loops over tokens that follow the definitions word by word."""

import math

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close
from helpers.inputs import random_rows

from fairseq_tutel import ops
from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends.torch import slots

GATING = [(17, 5, 1), (17, 5, 2), (17, 5, 4), (9, 6, 6), (3, 40, 7), (1, 1, 1)]


def loop_gating(logits, top_k, noise, pad, key=None):
    """Experts, gates and sums of rows of numbers, with the standard library."""
    experts, gates, prob_sum, entropy, lse = [], [], [0.0] * logits.shape[1], 0.0, []
    for t, row in enumerate(logits.tolist()):
        total = sum(math.exp(value) for value in row)
        prob = [math.exp(value) / total for value in row]
        extra = [0.0] * len(row) if noise is None else noise[t].tolist()
        score = [a + b for a, b in zip(row, extra, strict=True)]
        if key is not None:
            score = key[t].tolist()
        by = prob if key is None else score
        chosen = [max(range(len(row)), key=lambda e: by[e])]
        while len(chosen) < top_k:
            free = [e for e in range(len(row)) if e not in chosen]
            chosen.append(max(free, key=lambda e: score[e]))
        experts.append([-1] * top_k if pad is not None and pad[t] else chosen)
        gates.append([prob[e] for e in chosen])
        prob_sum = [a + b for a, b in zip(prob_sum, prob, strict=True)]
        entropy -= sum(p * math.log(p) for p in prob)
        lse.append(math.log(total))
    return experts, gates, prob_sum, entropy, lse


@pytest.mark.parametrize("extras", [(), ("noise", "pad"), ("key", "pad")], ids="-".join)
@pytest.mark.parametrize(("T", "E", "K"), GATING)
def test_topk_gating(T, E, K, extras):
    generator = torch.Generator().manual_seed(E)
    logits = torch.randn(T, E, dtype=torch.float64, generator=generator)
    drawn = torch.randn(T, E, dtype=torch.float64, generator=generator)
    noise, key = (drawn if name in extras else None for name in ("noise", "key"))
    pad = torch.arange(T) % 4 == 0 if extras else None
    got = ops.topk_gating(logits, K, noise_TE=noise, pad_T=pad, key_TE=key)
    want = loop_gating(logits, K, noise, pad, key)
    assert got[0].dtype == torch.int32
    assert got[0].tolist() == want[0]
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, torch.tensor(b, dtype=torch.float64), rtol=1e-12, atol=0)


def test_gating_edges():
    tied = ops.topk_gating(torch.zeros(2, 7), 6)[0]
    assert tied.tolist() == [[0, 1, 2, 3, 4, 5]] * 2  # more than the argmax rounds: sorted
    assert ops.topk_gating(torch.zeros(2, 7), 3)[0].tolist() == [[0, 1, 2]] * 2
    disabled = torch.tensor([[float("-inf"), 2.0, float("-inf")]])
    expert, gate, _, entropy, _ = ops.topk_gating(disabled, 3)
    assert expert.tolist() == [[1, 0, 2]] and gate.tolist() == [[1.0, 0.0, 0.0]]
    assert entropy == 0
    huge = torch.tensor([[3e38, -3e38, 0.0]])  # a difference of them overflows
    expert, gate, _, entropy, lse = ops.topk_gating(huge, 2)
    assert gate.tolist() == [[1.0, 0.0]] and entropy == 0 and lse == huge[0, 0]
    _, gate, _, entropy, _ = ops.topk_gating(torch.full((1, 4), float("-inf")), 2)
    assert gate.tolist() == [[0.25, 0.25]] and entropy.isfinite()
    assert ops.topk_gating(torch.tensor([[1.0, float("nan")]]), 1)[3].isnan()
    expert, gate, prob_sum, entropy, lse = ops.topk_gating(torch.zeros(0, 3), 2)
    assert expert.shape == gate.shape == (0, 2) and lse.shape == (0,)
    assert prob_sum.tolist() == [0, 0, 0] and entropy == 0


def loop_slots(expert, num_experts, priority):
    T, K = expert.shape
    order = list(range(T))
    if priority is not None:
        order.sort(key=lambda t: -priority[t].item())  # Python's sort is stable
    slot, seen = torch.full((T, K), -1), [0] * num_experts
    count = torch.zeros(K, num_experts, dtype=torch.int32)
    for k in range(K):
        for t in order:
            x = expert[t, k].item()
            if x >= 0:
                slot[t, k], seen[x] = seen[x], seen[x] + 1
                count[k, x] += 1
    return slot, count


@pytest.mark.parametrize("one_hot_limit", [0, 1 << 16], ids=["sort", "cumsum"])
@pytest.mark.parametrize("with_priority", [False, True], ids=["tokens", "priority"])
@pytest.mark.parametrize(("T", "E", "K"), [(23, 5, 2), (12, 4, 4), (30, 3, 1), (0, 3, 2)])
def test_assign_slots(T, E, K, with_priority, one_hot_limit, monkeypatch):
    monkeypatch.setattr(slots, "_MAX_ONE_HOT", one_hot_limit)
    generator = torch.Generator().manual_seed(T)
    expert = torch.randint(-1, E, (T, K), generator=generator, dtype=torch.int32)
    priority = torch.randint(0, 4, (T,), generator=generator).float() if with_priority else None
    slot, count = ops.assign_slots(expert, E, priority_T=priority)
    want_slot, want_count = loop_slots(expert, E, priority)
    assert slot.dtype == count.dtype == torch.int32
    assert slot.tolist() == want_slot.tolist()
    assert count.tolist() == want_count.tolist()


@pytest.mark.parametrize(
    ("T", "K", "E", "C", "kind"),
    [(12, 2, 4, 6, "spread"), (12, 2, 4, 2, "spread"), (5, 2, 3, 10, "one"),
     (4, 3, 3, 2, "dropped"), (0, 2, 3, 2, "spread"), (3, 2, 2, 0, "dropped")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dispatch_and_combine(T, K, E, C, kind, dtype):
    row, pair = random_rows(T, K, E, C, kind)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, 9, generator=generator, dtype=torch.float64).to(dtype)
    values = torch.randn(E * C, 9, generator=generator, dtype=torch.float64).to(dtype)
    values[pair < 0] = float("nan")
    weight = torch.rand(T, K, generator=generator)
    weight = weight.double() if dtype == torch.float64 else weight
    assert torch.equal(ops.dispatch(x, row, pair), naive.dispatch(x, row, pair))
    got = ops.combine(values, row, pair, weight)
    assert got.dtype == dtype
    assert_close("combine", got, naive.combine(values.double(), row, weight.double()), dtype)
    dy = torch.randn(T, 9, generator=generator, dtype=torch.float64).to(dtype)
    got = torch_backend.combine_bwd(dy, values, row, pair, weight)
    want = naive.combine_bwd(dy.double(), values.double(), row, weight.double())
    assert_close("d_rows", got[0], want[0], dtype)
    assert_close("d_weight", got[1], want[1], torch.float32)


def test_blocks_of_rows_are_joined(monkeypatch):
    """Rows are worked through in blocks; here a block holds three of them."""
    from fairseq_tutel.backends.torch import dispatch

    row, pair = random_rows(12, 2, 4, 6, "spread")
    x, values, weight = torch.randn(12, 9), torch.randn(24, 9), torch.rand(12, 2)
    args = (row, pair, weight)
    whole = [ops.dispatch(x, row, pair), *torch_backend.combine_bwd(x, values, *args)]
    monkeypatch.setattr(dispatch, "_BLOCK_NUMEL", 27)
    parts = [ops.dispatch(x, row, pair), *torch_backend.combine_bwd(x, values, *args)]
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def fairseq_activation(name):
    if name == "linear":
        return lambda x: x
    if name in ("silu", "swish"):  # here fairseq returns the class of a module
        return torch.nn.functional.silu
    from fairseq import utils

    return utils.get_activation_fn(name.replace("gelu_fast", "gelu_accurate"))


@pytest.mark.parametrize("block", [40, 1 << 21], ids=["blocks", "whole"])
@pytest.mark.parametrize("activation", sorted(torch_backend.ACTIVATIONS))
def test_bias_act_is_fairseqs(activation, block, monkeypatch):
    pytest.importorskip("fairseq")
    from fairseq_tutel.backends.torch import activation as module

    monkeypatch.setattr(module, "_BLOCK_NUMEL", block)
    function = fairseq_activation(activation)
    bias = torch.randn(3, 13, requires_grad=True)
    h, rows = torch.randn(3, 7, 13, requires_grad=True), torch.randn(21, 13, requires_grad=True)
    expert = torch.tensor([0] * 4 + [2] * 11)
    ragged = torch.cat([function(rows[:15] + bias[expert]), torch.zeros(6, 13)])
    cases = ((h, None, function(h + bias[:, None])), (rows, [4, 4, 15], ragged))
    for x, offsets, want in cases:
        options = {
            "activation": activation,
            "offsets": None if offsets is None else torch.tensor(offsets, dtype=torch.int32),
        }
        got = torch_backend.bias_act_fwd(x.detach(), bias.detach(), **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        dy = torch.randn(want.shape)
        grads = torch_backend.bias_act_bwd(dy, x.detach(), bias.detach(), **options)
        for a, b in zip(grads, torch.autograd.grad(want, (x, bias), dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bias_act_of_half_types_rounds_once(dtype):
    h, bias = torch.randn(2, 30, 20).to(dtype), torch.randn(2, 20).to(dtype)
    got = torch_backend.bias_act_fwd(h, bias, activation="gelu")
    exact = torch_backend.bias_act_fwd(h.double(), bias.double(), activation="gelu")
    # fp32 and fp64 rarely round to different sides; rounding the sum first differs in a third
    assert (got != exact.to(dtype)).float().mean() < 0.05
    assert_close("y", got, exact, dtype)


def test_dropout_repeats_with_its_seed():
    rows, bias = torch.randn(2, 100, 50), torch.zeros(2, 50)
    identity = torch.eye(50).repeat(2, 1, 1)

    def drop(p, seed=None):
        return ops.expert_ffn(
            rows, identity, bias, identity, bias, activation="linear", dropout_p=p, seed=seed
        )

    y = drop(0.25, 5)
    assert torch.equal(y, drop(0.25, torch.tensor(5)))
    assert not torch.equal(y, drop(0.25, 6))
    keep = y != 0
    assert abs(keep.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(y, rows * keep / 0.75)
    torch.manual_seed(0)
    first = drop(0.25)
    torch.manual_seed(0)
    assert torch.equal(first, drop(0.25))
    torch.testing.assert_close(drop(0.0, 5), rows)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_fast_cumsum_sub_one(dtype):
    mask = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=dtype)
    got = ops.fast_cumsum_sub_one(mask)
    assert got.dtype == torch.int32 and got.tolist() == [[0, -1], [1, 0], [1, 1]]


def test_errors_name_the_values():
    row = torch.zeros(4, 2, dtype=torch.int32)
    pair = torch.zeros(8, dtype=torch.int32)
    x = torch.zeros(4, 3)
    cases = [
        ("top_k must be between 1 and 3 experts, got 4", lambda: ops.topk_gating(x, 4)),
        ("got 0", lambda: ops.topk_gating(x, 0)),
        ("logits must be", lambda: ops.topk_gating(x[0], 1)),
        ("noise", lambda: ops.topk_gating(x, 1, noise_TE=x[:2])),
        ("pad", lambda: ops.topk_gating(x, 1, pad_T=torch.zeros(3, dtype=torch.bool))),
        ("int32", lambda: ops.assign_slots(row.long(), 3)),
        ("priority", lambda: ops.assign_slots(row, 3, priority_T=torch.zeros(5))),
        ("x must be", lambda: ops.dispatch(x[:3], row, pair)),
        ("topk_weight", lambda: ops.combine(torch.zeros(8, 3), row, pair, torch.zeros(4, 3))),
        ("src_pair must be", lambda: ops.dispatch(x, row, pair.long())),
        (r"rows must be \(8, model_dim\)", lambda: ops.combine(x, row, pair, torch.zeros(4, 2))),
        ("mask must be", lambda: ops.fast_cumsum_sub_one(x)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
