"""The torch.library side: schemas, fake implementations, gradients, torch.compile."""

import pytest
import torch
from helpers.inputs import random_rows
from helpers.saved import SavedBytes
from torch.autograd import gradcheck

from fairseq_tutel import ops
from fairseq_tutel.ops.expert_ffn import dropout_seed


def calls(requires_grad):
    """(operator, arguments) for every operator, options used and left out."""
    row, pair = random_rows(7, 2, 4, 3, "spread")
    logits, noise = torch.randn(7, 4), torch.randn(7, 4)
    pad = torch.arange(7) % 3 == 0
    x, rows, weight = torch.randn(7, 5), torch.randn(12, 5), torch.rand(7, 2)
    expert = torch.randint(-1, 4, (7, 2), dtype=torch.int32)
    position, num_routed = ops.assign_slots(expert, 4)
    bias = torch.randn(4, 5)
    for tensor in (logits, x, rows, weight, bias):
        tensor.requires_grad_(requires_grad)
    return [
        ("topk_gating", (logits, 2, None, None)),
        ("topk_gating", (logits, 2, noise, pad)),
        ("topk_gating", (logits, 2, None, pad, noise)),
        ("topk_gating", (logits, 2, None, None, None, False)),
        ("assign_slots", (expert, 4, None)),
        ("assign_slots", (expert, 4, torch.rand(7))),
        ("assign_rows", (expert, weight, 4, 3, True, True, None, None, None)),
        ("assign_rows", (expert, weight, 4, None, False, False, torch.rand(7), None, None)),
        ("assign_rows", (expert, weight, 4, 3, False, True, None, position, num_routed)),
        ("scaled_dot", (torch.randn(4, requires_grad=requires_grad), num_routed[0], 0.5)),
        ("gate_logits", (x, torch.randn(4, 5, requires_grad=requires_grad))),
        ("dispatch", (x, row, pair)),
        ("combine", (rows, row, pair, weight, None, None)),
        ("combine", (rows, row, pair, weight, bias, expert)),
    ]


ALL_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor",
             "test_aot_dispatch_dynamic")  # fmt: skip
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(calls(False))]


@pytest.mark.parametrize("index", range(len(IDS)), ids=IDS)
def test_opcheck(index):
    name, args = calls(requires_grad=True)[index]
    # the last one adds up all outputs and fails where the first one is integer; the layer below,
    # compiled with dynamic shapes, covers it
    tests = ALL_TESTS[:-1] if name in ("topk_gating", "assign_rows") else ALL_TESTS
    torch.library.opcheck(getattr(torch.ops.fairseq_tutel, name).default, args, test_utils=tests)


def layer(x, wg, w1, b1, w2, b2):
    """A small MoE layer out of the operators alone, as the moe package chains them."""
    E, T = wg.shape[1], x.shape[0]
    expert, gate, prob_sum, entropy, lse = ops.topk_gating((x @ wg).float(), 2)
    options = {"capacity": None, "padded": False, "normalize": True}
    row, pair, weight, _, end, count = ops.assign_rows(expert, gate, E, **options)
    rows = ops.dispatch(x, row, pair)
    out = ops.expert_ffn(rows, w1, b1, w2, b2, activation="gelu", offsets=end)
    y = ops.combine(out, row, pair, weight)
    balance = (prob_sum * count[0]).sum() * E / T**2
    return y, balance + 1e-3 * lse.square().mean(), entropy


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 8), (8, 4), (4, 16, 8), (4, 16), (4, 8, 16), (4, 8)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def run(function, tensors):
    y, loss, entropy = function(*tensors)
    (y.square().mean() + loss).backward()
    return [y, loss, entropy, *(t.grad for t in tensors)]


def test_compiles_once_for_all_token_counts():
    """Without a graph break; the number of tokens is no constant of the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 9, 5):
        tensors = parameters()
        tensors[0] = tensors[0].detach()[:tokens].requires_grad_()
        plain = [t.detach().clone().requires_grad_() for t in tensors]
        torch.testing.assert_close(run(compiled, tensors), run(layer, plain))


def test_dropout_repeats_with_its_seed_and_draws_a_new_mask_without():
    torch._dynamo.reset()
    rows, bias = torch.randn(2, 50, 20), torch.zeros(2, 20)
    fc = torch.eye(20).repeat(2, 1, 1), bias

    def drop(seed=None):
        return ops.expert_ffn(rows, *fc, *fc, activation="linear", dropout_p=0.5, seed=seed)

    compiled = torch.compile(drop, fullgraph=True, backend="aot_eager")
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)
    assert abs((first != 0).float().mean() - 0.5) < 0.05
    torch.testing.assert_close(first, rows * (first != 0) / 0.5)
    assert torch.equal(compiled(7), drop(torch.tensor(7))) and not torch.equal(drop(7), drop(6))
    torch.manual_seed(0)
    first = drop()
    torch.manual_seed(0)
    assert torch.equal(first, drop())


@pytest.mark.parametrize("seed", [0, -1, 2**53 + 1, -(2**63), 2**63 - 1])
def test_every_int64_is_a_seed(seed, monkeypatch):
    """torch.tensor(seed, device=...) would wait: it copies from pageable memory to a GPU."""
    cpu, given = torch.device("cpu"), torch.tensor(3)
    monkeypatch.setattr(torch, "tensor", None)
    tensor = dropout_seed(0.1, seed, cpu)
    assert tensor.dtype == torch.int64 and tensor.shape == () and tensor.item() == seed
    assert dropout_seed(0.1, given, cpu) is given and dropout_seed(0.0, seed, cpu) is None


def test_the_jacobian_of_a_layer_is_vectorized():
    """Batched gradients of the kind that torch had before functorch."""

    def y(x):
        return layer(x, *parameters()[1:])[0]

    jacobian, x = torch.autograd.functional.jacobian, parameters()[0].detach()
    torch.testing.assert_close(jacobian(y, x, vectorize=True), jacobian(y, x))


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


NAMES = ["rows", "weight", "bias"]


@pytest.mark.parametrize("tokens, kind", [(7, "spread"), (3, "dropped"), (0, "spread")])
@pytest.mark.parametrize("wanted", [NAMES, *([name] for name in NAMES)], ids=str)
def test_gradients_of_combine_with_and_without_frozen_arguments(wanted, tokens, kind):
    """Others in fp64: test_product.py, test_router.py."""
    row, pair = random_rows(tokens, 2, 4, 3, kind)
    tensors = dict(zip(NAMES, (random(12, 5), random(tokens, 2), random(4, 5)), strict=True))
    expert = torch.where(row < 0, -1, row // 3).int()

    def call(*given):
        fixed = {name: tensor.detach() for name, tensor in tensors.items()}
        rows, weight, bias = (fixed | dict(zip(wanted, given, strict=True))).values()
        return ops.combine(rows, row, pair, weight, bias, expert)

    assert gradcheck(call, tuple(tensors[name] for name in wanted))


@pytest.mark.parametrize("used", [1, 2, 4])
def test_gating_of_which_one_output_is_used(used):
    assert gradcheck(lambda logits: ops.topk_gating(logits, 2)[used], random(5, 4))
    flags = [output.requires_grad for output in ops.topk_gating(random(4, 3), 2)]
    assert flags == [False, True, True, False, True]  # not of indices and entropy


def test_dispatch_does_not_keep_the_tokens():
    row, pair = random_rows(7, 2, 4, 3, "spread")
    with SavedBytes(row, pair) as saved:
        ops.dispatch(random(7, 5), row, pair)
    assert saved.total() == 0


BACKWARD = {
    "topk_gating_bwd": lambda: (
        torch.randn(7, 2), torch.randn(4), torch.randn(7), torch.randn(7, 4), torch.randn(7),
        torch.randint(0, 4, (7, 2), dtype=torch.int32),
    ),
    "gate_logits_bwd": lambda: (
        torch.randn(7, 4), torch.randn(7, 5), torch.randn(4, 5), True, True,
    ),
    "dispatch_bwd": lambda: (torch.randn(12, 5), random_rows(7, 2, 4, 3, "spread")[0]),
    "assign_rows_bwd": lambda: (
        torch.randn(7, 2), torch.rand(7, 2), random_rows(7, 2, 4, 3, "spread")[0], True,
    ),
    "combine_bwd": lambda: (
        torch.randn(7, 5), torch.randn(12, 5), *random_rows(7, 2, 4, 3, "spread"),
        torch.rand(7, 2), torch.randn(4, 5), torch.zeros(7, 2, dtype=torch.int32), True, True, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BACKWARD))
def test_opcheck_of_backward(name):
    args = BACKWARD[name]()
    torch.library.opcheck(getattr(torch.ops.fairseq_tutel, name).default, args)
    needs = sum(value is True for value in args[-3:])
    for only in range(needs if needs > 1 else 0):  # shape (0,) stands for a gradient not needed
        args = (*args[:-needs], *(number == only for number in range(needs)))
        torch.library.opcheck(getattr(torch.ops.fairseq_tutel, name).default, args)
