"""The torch twins against loops over tokens that follow the definitions word by word."""

import itertools
import math

import pytest
import torch

from fairseq_tutel import ops
from fairseq_tutel.backends import torch as torch_backend

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
    less = ops.topk_gating(logits, K, noise_TE=noise, pad_T=pad, key_TE=key, sums=False)
    assert [each.shape for each in less[2:4]] == [(0,), (0,)]
    assert all(torch.equal(less[i], got[i]) for i in (0, 1, 4))


def test_gating_edges():
    tied = ops.topk_gating(torch.zeros(2, 7), 6)[0]
    assert tied.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
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


def fairseq_activation(name):
    if name == "linear":
        return lambda x: x
    if name in ("silu", "swish"):  # here fairseq returns the class of a module
        return torch.nn.functional.silu
    from fairseq import utils

    return utils.get_activation_fn(name.replace("gelu_fast", "gelu_accurate"))


@pytest.mark.parametrize("T", [0, 61])
@pytest.mark.parametrize("E", [1, 5, 128, 32768])
def test_slots_and_rows(E, T):
    """Some pairs are not routed. With an odd E tokens have priorities, some of them equal."""
    K = 3
    generator = torch.Generator().manual_seed(E)
    expert = torch.randint(-1, E, (K, T), generator=generator, dtype=torch.int32).t()
    expert[:2] = E - 1
    priority = torch.randint(9, (T,), generator=generator).float() if E % 2 else None
    order = range(T) if priority is None else sorted(range(T), key=lambda t: -priority[t].item())
    count, slot = [[0] * E for _ in range(K)], [[-1] * K for _ in range(T)]
    for k in range(K):
        for t in order:
            e = int(expert[t, k])
            if e >= 0:
                slot[t][k] = sum(each[e] for each in count)
                count[k][e] += 1
    slots = got_slot, got_count = ops.assign_slots(expert, E, priority_T=priority)
    assert got_slot.tolist() == slot and got_count.tolist() == count
    assert got_slot.dtype == got_count.dtype == torch.int32
    gate = torch.rand(T, K, generator=generator)
    for limit, padded in ((None, False), (2, False), (0, False), (2, True), (0, True)):
        loads = [sum(each) for each in zip(*count, strict=True)]
        kept = loads if limit is None else [min(load, limit) for load in loads]
        begins = list(itertools.accumulate(kept, initial=0))
        num_rows = E * limit if padded else T * K
        pairs, dest = [-1] * num_rows, [[-1] * K for _ in range(T)]
        for t, k in itertools.product(range(T), range(K)):
            e = int(expert[t, k])
            if e >= 0 and slot[t][k] < kept[e]:
                dest[t][k] = (e * limit if padded else begins[e]) + slot[t][k]
                pairs[dest[t][k]] = t * K + k
        weight = torch.where(torch.tensor(dest).view(T, K) >= 0, gate, 0)
        ends = [] if padded else begins[1:]
        want = [dest, pairs, weight.tolist(), kept, ends, count]
        options = {"capacity": limit, "padded": padded, "normalize": False}
        for order in ({"priority_T": priority}, {"slots": slots}):
            got = ops.assign_rows(expert, gate, E, **order, **options)
            assert [each.tolist() for each in got] == want
            assert {each.dtype for each in (*got[:2], *got[3:])} == {torch.int32}


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
    cases = [
        ("top_k must be between 1 and 3 experts, got 4", lambda: ops.topk_gating(x, 4)),
        ("got 0", lambda: ops.topk_gating(x, 0)),
        ("logits must be", lambda: ops.topk_gating(x[0], 1)),
        ("noise", lambda: ops.topk_gating(x, 1, noise_TE=x[:2])),
        ("pad", lambda: ops.topk_gating(x, 1, pad_T=torch.zeros(3, dtype=torch.bool))),
        ("int32", lambda: ops.assign_slots(row.long(), 3)),
        ("priority", lambda: ops.assign_slots(row, 3, priority_T=torch.zeros(5))),
        (
            "slots have their order",
            lambda: ops.assign_rows(
                row,
                x[:, :2],
                3,
                capacity=None,
                padded=False,
                normalize=False,
                priority_T=x[:, 0],
                slots=(row, row[:2, :1].expand(2, 3)),
            ),
        ),
        ("x must be", lambda: ops.dispatch(x[:3], row, pair)),
        ("topk_weight", lambda: ops.combine(torch.zeros(8, 3), row, pair, torch.zeros(4, 3))),
        ("src_pair must be", lambda: ops.dispatch(x, row, pair.long())),
        (r"rows must be \(8, model_dim\)", lambda: ops.combine(x, row, pair, torch.zeros(4, 2))),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
