"""Kernels, and the torch backend's functions of their names, against their definitions in fp64.

A function below draws the inputs of a case, and returns what a backend found and what is right.
"""

import itertools
from functools import partial

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close
from helpers.inputs import expert_rows, random_rows

from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends import triton as kernels
from fairseq_tutel.backends.triton import _grouped, _grouped_tma

FP32, FP16, BF16, INT32 = torch.float32, torch.float16, torch.bfloat16, torch.int32


def draw(*shape, dtype=FP32, device="cpu", seed=3):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(dtype).to(device)


def gradients(outputs, leaves, given):
    """Gradients of leaves that the outputs do not need are zero."""
    if not any(each.requires_grad for each in outputs):
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return [torch.zeros_like(leaf) if d is None else d for leaf, d in pairs]


def dispatch_and_combine(room, device, dtype, biased, T, K, E, C, M, kind):
    """What lies in rows of nobody, and the weights of dropped pairs, must not matter."""
    row, pair = (each.to(device) for each in random_rows(T, K, E, C, kind))
    x, dy = (draw(T, M, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    rows, d_rows = (draw(E * C, M, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    rows[pair < 0] = d_rows[pair < 0] = float("nan")
    weight, bias = draw(T, K, device=device).abs(), draw(E, M, dtype=dtype, device=device)
    given = (bias, torch.where(row < 0, -1, row // max(C, 1)).int()) if biased else ()
    leaves = [each.double().requires_grad_() for each in (rows, weight, *given[:1])]
    y = naive.combine(leaves[0], row, *leaves[1:], *given[1:])
    d_leaves = gradients([y], leaves, [dy.double()])
    d_x = naive.combine(d_rows.double(), row, torch.ones_like(weight))
    names = "rows", "d_x", "y", "d_rows", "d_weight", "d_bias"
    want = dict(zip(names, (naive.dispatch(x, row, pair), d_x, y, *d_leaves), strict=False))
    weight[row < 0] = float("nan")
    done = room.dispatch_fwd(x, row, pair), room.dispatch_bwd(d_rows, row)
    done += (
        room.combine_fwd(rows, row, weight, *given),
        *room.combine_bwd(dy, rows, row, pair, weight, *given),
    )
    found = dict(zip(names, done, strict=True))
    assert torch.equal(found["rows"], want["rows"])
    assert (found["d_rows"][pair < 0] == 0).all() and (found["d_weight"][row < 0] == 0).all()
    return found, want, {"d_weight": FP32}, dtype


def gating(room, device, kind, padded, T, E, K):
    logits, drawn = 2 * draw(T, E, device=device), draw(T, E, device=device, seed=9)
    pad = torch.arange(T, device=device) % 3 == 1 if padded else None
    given = {} if kind == "plain" else {kind: drawn}
    expert, gate, prob_sum, entropy, lse, choice = room.topk_gating_fwd(
        logits, K, pad_T=pad, **given
    )
    exact = logits.double().requires_grad_()
    prob, score = exact.softmax(1), logits.double() + drawn if kind == "noise_TE" else logits
    first = prob.argmax(1) if kind != "key_TE" else drawn.argmax(1)
    score = (drawn if kind == "key_TE" else score).detach().clone().double()
    chosen = [first]
    for _ in range(K - 1):
        score.scatter_(1, chosen[-1][:, None], float("-inf"))
        chosen.append(score.argmax(1))
    chosen = torch.stack(chosen, 1)
    outputs = [prob.gather(1, chosen), prob.sum(0), exact.logsumexp(1)]
    d_outputs = [draw(*each.shape, device=device, seed=5) for each in outputs]
    (d_logits,) = gradients(outputs, [exact], [d.double() for d in d_outputs])
    want = {
        "expert": chosen.int() if pad is None else chosen.int().masked_fill(pad[:, None], -1),
        "choice": chosen.int() if padded else chosen.int()[:0],
        "entropy": -(prob * prob.log()).sum(),
        **dict(zip(("gate", "prob_sum", "lse"), outputs, strict=True)),
        "d_logits": d_logits,
    }
    found = {"expert": expert, "choice": choice, "entropy": entropy, "gate": gate}
    found |= {"prob_sum": prob_sum, "lse": lse}
    every = choice if padded else expert
    found["d_logits"] = room.topk_gating_bwd(*d_outputs, logits, lse, every)
    less = room.topk_gating_fwd(logits, K, sums=False, pad_T=pad, **given)
    assert [each.shape for each in less[2:4]] == [(0,), (0,)]
    assert torch.equal(less[1], gate) and torch.equal(less[4], lse)
    return found, want, {"expert": INT32, "choice": INT32}, FP32


def slots(room, device, kind, prioritized, T, E, K):
    generator = torch.Generator().manual_seed(E)
    expert = torch.rand(T, max(E, K), generator=generator).argsort(1)[:, :K].clamp(max=E - 1).int()
    if kind == "one":
        expert[:] = E - 1  # all on one expert; the others are empty
    elif kind == "dropped":
        expert[torch.rand(T, K, generator=generator) < 0.4] = -1
    # few distinct priorities, so that ties occur
    priority = (torch.arange(T) * 7 % 5).float() if prioritized else None
    slot, count = naive.assign_slots(expert, E, priority)
    want = {"slot": torch.tensor(slot).view(T, K), "count": torch.tensor(count).view(K, E)}
    moved = None if priority is None else priority.to(device)
    found = room.assign_slots(expert.to(device), E, priority_T=moved)
    return dict(zip(want, found, strict=True)), want, dict.fromkeys(want, INT32), None


def rows_of_pairs(room, device, padded, normalize, T, E, K, capacity):
    generator = torch.Generator().manual_seed(T + K)
    expert = torch.rand(T, E, generator=generator).argsort(1)[:, :K].int()
    expert[torch.rand(T, K, generator=generator) < 0.2] = -1
    priority = (torch.arange(T) * 7 % 5).float() if normalize else None
    slot, counts = naive.assign_slots(expert, E, priority)
    position = torch.tensor(slot, dtype=INT32).view(T, K)
    counts = torch.tensor(counts, dtype=INT32)
    gate = torch.rand(T, K, generator=generator)
    gate[::8], gate[4::8] = 0, 1e-9  # sums below epsilon, which is the divisor then
    layout = {"capacity": capacity, "padded": padded, "normalize": normalize}
    leaf, d_weight = gate.double().requires_grad_(), draw(T, K)
    row, pair, weight, kept = naive.assign_rows(expert, position, leaf, E, **layout)
    (d_gate,) = gradients([weight], [leaf], [d_weight.double()])
    want = {"row": row, "pair": pair, "weight": weight, "kept": kept}
    want |= {"ends": kept[:0] if padded else kept.cumsum(0).int(), "d_gate": d_gate}
    args = [each.to(device) for each in (expert, position, gate, counts)]
    priority = None if priority is None else priority.to(device)
    *sorted_pairs, found_counts = room.sort_pairs_fwd(
        args[0], args[2], E, priority_T=priority, **layout
    )
    assert found_counts.tolist() == counts.tolist()
    done = room.assign_rows_fwd(*args, **layout)
    assert all(map(torch.equal, done, sorted_pairs))
    d = room.assign_rows_bwd(d_weight.to(device), args[2], done[0], normalize=normalize)
    ints = dict.fromkeys(("row", "pair", "kept", "ends"), INT32)
    return dict(zip(want, (*done, d), strict=True)), want, ints, FP32


def products(ways, device, dtype, ends, A, B):
    """Each expert's own rows; those of nobody may hold anything."""
    R = 57
    rows, other = (draw(R, width, dtype=dtype, device=device) for width in (A, B))
    rows[ends[-1] :] = other[ends[-1] :] = float("nan")
    weight, offsets = draw(4, A, B, dtype=dtype, device=device), torch.tensor(ends).int().to(device)
    want = {"product": naive.rows_product(rows.double(), weight.double(), ends)[: ends[-1]]}
    want["gradient"] = naive.weight_gradient(rows.double(), other.double(), ends)
    found, transposed = {}, weight.mT.contiguous().mT  # as in training
    for number, (product, gradient) in enumerate(ways):
        found[f"product {number}"] = product(rows, weight, offsets)[: ends[-1]]
        found[f"product {number}T"] = product(rows, transposed, offsets)[: ends[-1]]
        found[f"gradient {number}"] = gradient(rows, other, offsets)
        assert found[f"gradient {number}"].is_contiguous()
    return found, {name: want[name.split()[0]] for name in found}, {}, dtype


def gathered(ways, device, dtype):
    """Row r is token pair[r] // 3; the last rows have no token, and no row is token 0."""
    tokens, weight = draw(19, 40, dtype=dtype, device=device), draw(4, 40, 24, dtype=dtype)
    tokens[0], ends, weight = float("nan"), [20, 20, 33, 40], weight.to(device)
    pair = torch.randperm(57).int().clamp(min=3).to(device)
    pair[ends[-1] :] = -1
    other, offsets = draw(57, 24, dtype=dtype, device=device), torch.tensor(ends).int().to(device)
    rows, source = tokens[pair.long() // 3].double(), _grouped_tma.Source(pair, 3)
    ((product, gradient),) = ways
    found = {"product": product(tokens, weight, offsets, source)[: ends[-1]]}
    found["gradient"] = gradient(other, tokens, offsets, source)
    found["transpose"] = gradient(other, tokens, offsets, source, transposed=True)
    assert found["transpose"].is_contiguous()
    want = {"product": naive.rows_product(rows, weight.double(), ends)[: ends[-1]]}
    want["gradient"] = naive.weight_gradient(other.double(), rows, ends)
    return found, want | {"transpose": want["gradient"].mT}, {}, dtype


def activation(_, device, dtype, name, biased, shape, ends):
    h, bias, dy, offsets = expert_rows(shape, ends, dtype, device, 1 + (name in GATED))
    used = slice(None if ends is None else ends[-1])  # others are unspecified
    given, how = (bias if biased else None), {"activation": name, "offsets": offsets}
    exact = [h.double(), bias.double() if biased else None]
    y = naive.bias_act(*exact, **how)[used]
    d_h, d_bias = naive.bias_act_bwd(dy.double(), *exact, **how)
    want = {"y": y, "d_h": d_h[used], "d_bias": d_bias}
    found = kernels.bias_act_fwd(h, given, **how), *kernels.bias_act_bwd(dy, h, given, **how)
    found = [x[used] if x is not found[2] else x for x in found]
    return dict(zip(want, found, strict=True)), want, {}, dtype


GATED = ("swiglu", "geglu")
MAPS = {
    "M is no power of two": (37, 2, 5, 16, 70, "spread"),
    "M is one tile, drops": (16, 1, 4, 3, 32, "spread"),
    "all experts": (11, 4, 4, 11, 33, "spread"),
    "more choices than are unrolled": (9, 6, 7, 5, 33, "spread"),
    "narrowest row": (13, 2, 4, 9, 1, "spread"),
    "one expert": (10, 2, 6, 20, 40, "one"),
    "all dropped": (6, 3, 3, 4, 17, "dropped"),
    "no tokens": (0, 2, 3, 4, 17, "spread"),
    "no rows": (5, 2, 3, 0, 17, "dropped"),
}
# neither a power of two; smallest; more blocks than programs; all chosen; one token a tile; none
GATINGS = [(37, 5, 2), (1, 1, 1), (130, 8, 1), (33, 6, 6), (9, 70, 4), (0, 4, 2)]
# a block partly filled; exactly one block; more blocks than a tile of the scan, K = E; many experts
SLOTS = [(53, 7, 2), (16, 16, 4), (150, 3, 3), (1, 1, 1), (0, 5, 2), (61, 128, 3)]
# overflow; most dropped; all experts; many choices; dropless; no capacity; no tokens; unused rows
ROWS = [(37, 5, 2, 9), (40, 4, 1, 3), (11, 4, 4, 11), (9, 7, 6, 5), (12, 3, 2, None)]
ROWS += [(12, 3, 2, 0), (0, 3, 2, 4), (33, 40, 2, 40)]
ENDS = [3, 30, 41, 57], [0, 0, 57, 57], [20, 20, 33, 40], [0, 0, 0, 0]
SHAPES = {
    "padded": ((3, 19, 45), None),  # tiles and columns partly filled
    "one tile": ((1, 8, 32), None),
    "no rows, padded": ((5, 0, 7), None),
    "tail": ((40, 45), [13, 13, 31]),  # and an empty expert
    "all on the first": ((17, 33), [17, 17]),
    "all on the last": ((17, 33), [0, 17]),
    "only a tail": ((16, 8), [0, 0, 0, 0, 0]),
    "no rows": ((0, 8), [0, 0]),
}
BOTH = [
    *((dispatch_and_combine, FP32, *given) for given in itertools.product((0, 1), MAPS)),
    *((dispatch_and_combine, half, 1, name) for half in (FP16, BF16) for name in [*MAPS][:2]),
    *((gating, *given) for given in itertools.product(("plain", "noise_TE", "key_TE"), (0, 1),
                                                      GATINGS)),
    *((slots, *given) for given in itertools.product(("spread", "one", "dropped"), (0, 1), SLOTS)),
    *((rows_of_pairs, padded, normalize, given) for padded, normalize, given in
      itertools.product((False, True), (False, True), ROWS) if not padded or given[-1] is not None),
]  # fmt: skip
OTHERS = sorted(naive.ACTIVATIONS.keys() - {"gelu", *GATED})
ACTIVATIONS = [
    *((FP32, name, 1, shape) for name in ("gelu", "swiglu") for shape in SHAPES),
    *((FP32, name, 1, "padded") for name in OTHERS),
    *((FP32, "geglu", biased, "padded") for biased in (0, 1)),
    *((half, name, 1, shape) for half in (FP16, BF16) for name in ("gelu", "swiglu")
      for shape in ("padded", "tail")),
]  # fmt: skip
LOOKED_UP = {dispatch_and_combine: MAPS, activation: SHAPES}


def arguments(function, *given):
    """The case's numbers; a case may have a name."""
    *some, last = given
    last = LOOKED_UP.get(function, {}).get(last, last)
    return [*some, *last]


def check(found, want, dtypes, dtype):
    assert found.keys() >= want.keys()
    for name, exact in want.items():
        assert found[name].dtype == dtypes.get(name, dtype), name
        if exact.is_floating_point():
            assert_close(name, found[name], exact, found[name].dtype)
        else:
            assert found[name].tolist() == exact.tolist(), name


@pytest.mark.parametrize("room", [torch_backend, kernels], ids=["torch", "triton"])
@pytest.mark.parametrize(
    "case", BOTH, ids=lambda case: "-".join(map(str, (case[0].__name__, *case[1:])))
)
def test_both_backends_equal_the_definition(case, room, device):
    function, *given = case
    check(*function(room, device, *arguments(function, *given)))


@pytest.mark.parametrize("case", ACTIVATIONS, ids=str)
def test_activations_equal_autograd(case, device):
    check(*activation(kernels, device, *arguments(activation, *case)))


EVERY_GPU = [(_grouped._rows_product, _grouped.weight_gradient)]
TMA = [
    (partial(_grouped_tma.rows_product_tma, tile=tile),
     partial(_grouped_tma.weight_gradient_tma, tile=_grouped_tma.tma_tiles(False)[-1]))
    for tile in {*_grouped_tma.tma_tiles(True), *_grouped_tma.tma_tiles(False)}
]  # fmt: skip
PRODUCTS = [
    pytest.param(ways, dtype, id=f"{'TMA' if ways is TMA else 'every GPU'}-{dtype}")
    for ways, dtype in [(EVERY_GPU, FP32), *itertools.product((EVERY_GPU, TMA), (FP16, BF16))]
]


@pytest.mark.parametrize(("ways", "dtype"), PRODUCTS)
def test_products_equal_those_of_each_expert(ways, dtype, device):
    if ways is TMA and device.type == "cuda" and not _grouped_tma.has_tma(device):
        pytest.skip("a GPU without TMA")
    every, alone = [(partial(a, source=None), partial(b, source=None)) for a, b in ways], ways[:1]
    for ends in ENDS:
        check(*products(every, device, dtype, ends, 40, 24))
        if dtype == FP32:  # no multiples of a tile
            check(*products(every, device, dtype, ends, 33, 20))
    check(*gathered(alone, device, dtype))


def test_only_needed_gradients_are_computed(device):
    row, pair = (each.to(device) for each in random_rows(7, 2, 3, 5, "spread"))
    given = draw(7, 20, device=device), draw(15, 20, device=device), row, pair
    given = *given, draw(7, 2, device=device)
    both = kernels.combine_bwd(*given)
    only_rows = kernels.combine_bwd(*given, needs_weight=False)
    only_weight = kernels.combine_bwd(*given, needs_rows=False)
    assert torch.equal(only_rows[0], both[0]) and only_rows[1].shape == (0,)
    assert torch.equal(only_weight[1], both[1]) and only_weight[0].shape == (0,)


NAN, INF, THIRD = float("nan"), float("inf"), 1 / 3
# logits -> experts, gates, None if unspecified, and whether the entropy is NaN
BAD_LOGITS = {
    "all disabled": ([-INF] * 3, [0, 1, 2], [THIRD] * 3, False),  # as at the finite floor
    "two disabled": ([-INF, 2.0, -INF], [1, 0, 2], [1.0, 0.0, 0.0], False),  # each chosen once
    "tied": ([0.0] * 3, [0, 1, 2], [THIRD] * 3, False),
    "NaN": ([1.0, NAN, 0.0], None, None, True),
    "all NaN": ([NAN] * 3, None, None, True),
    "infinite": ([0.0, INF, 1.0], None, None, True),
    "far apart": ([3e38, -3e38, 0.0], [0, 2, 1], [1.0, 0.0, 0.0], False),  # differences overflow
}


@pytest.mark.parametrize("name", BAD_LOGITS)
def test_bad_logits_are_treated_alike(name, device):
    bad, experts, gates, is_nan = BAD_LOGITS[name]
    logits = torch.tensor([[0.5, -1.0, 2.0], bad], device=device)
    got = kernels.topk_gating_fwd(logits, 3)
    want = torch_backend.topk_gating_fwd(logits, 3)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[3].isnan().item() == is_nan
    if experts is not None:
        assert got[0][1].tolist() == experts
        torch.testing.assert_close(got[1][1].cpu(), torch.tensor(gates))
    grads = [torch.ones_like(got[1]), torch.ones(3, device=device), torch.ones(2, device=device)]
    d_got = kernels.topk_gating_bwd(*grads, logits, got[4], got[0])
    d_want = torch_backend.topk_gating_bwd(*grads, logits, want[4], want[0])
    torch.testing.assert_close(d_got, d_want, equal_nan=True)
