"""FLOPs that torch's counter finds in a layer, against those of its products."""

import functools
import itertools

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.inputs import random_rows
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training import add_lora

T, K, E, M, F = 12, 2, 4, 16, 32
DROPLESS = {"capacity_factor": 0.0}


def flops(call, x, backward=True):
    """Count a forward pass, and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        y = call(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


# options of a layer -> rows, products of each (of M times F), FLOPs of a shared expert
PAIR, GATE = 2 * M * F, 2 * T * M * E
CASES = {
    "dropless": (DROPLESS, T * K, 2, 0),
    "padded, of which half is unused": ({"capacity_factor": 2.0}, 2 * T * K, 2, 0),
    "gated, dropless": ({"expert_network": "swiglu", **DROPLESS}, T * K, 3, 0),
    "gated, padded": ({"expert_network": "geglu"}, T * K, 3, 0),
    "not in our operators": ({"expert_network": "clamped_swiglu"}, T * K, 3, 0),
    "shared expert": ({"shared_expert_dim": 48, **DROPLESS}, T * K, 2, 2 * T * 2 * M * 48),
    "fp8": ({"expert_compute": "fp8", **DROPLESS}, T * K, 2, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_counts_its_products(case):
    """In training, with checkpoints, on tokens without a gradient, and in evaluation."""
    options, rows, products, shared = CASES[case]
    layer = MoELayer(M, E, F, top_k=K, seed=1, **options)
    x, grad = torch.randn(T, M), torch.randn(T, M, requires_grad=True)
    forward, first = rows * products * PAIR + shared + GATE, rows * (products - 1) * PAIR
    assert flops(layer, grad) == 3 * forward
    # no gradient of the tokens by the gate, the shared expert's first layer and the experts' fc1
    assert flops(layer, x) == 3 * forward - GATE - shared // 2 - first
    for reentrant in (False, True):
        again = functools.partial(checkpoint, layer, use_reentrant=reentrant)
        # torch's own recomputation stops before the last product, whose result nobody saved
        assert flops(again, grad) == 4 * forward - (0 if reentrant else shared // 2)
    with torch.no_grad():
        assert flops(layer, x, backward=False) == forward
    layer.experts.requires_grad_(False), layer.gate.requires_grad_(False)
    assert flops(layer, grad) == 2 * forward + shared


@pytest.mark.parametrize(("kept", "again"), [("lean", 0), ("minimal", T * K * PAIR)])
def test_an_operator_that_computes_again_counts_it(kept, again):
    maps = *random_rows(T, K, E, T * K // E, "spread"), torch.zeros(T, K, dtype=torch.int32)
    shapes = (T, M), (T, K), (E, F, M), (E, F), (E, M, F), (E, M)
    x, weight, *params = (torch.randn(shape, requires_grad=True) for shape in shapes)
    how = {"options": ops.FFNOptions("gelu", (0.0, 0.0)), "memory": ops.ActivationMemory(kept)}
    given = weight, *maps, *params
    counted = flops(lambda x: ops.routed_ffn(x, *given, offsets=None, **how), x)
    assert counted == 3 * T * K * 2 * PAIR + again


def test_low_rank_updates():
    """The counter hooks the experts, which then run twice, with gradients of the summed weights."""
    rank = 4
    model = torch.nn.Sequential(MoELayer(M, E, F, top_k=K, **DROPLESS))
    add_lora(model, rank=rank)
    x = torch.randn(T, M, requires_grad=True)
    sums, products = E * rank * 2 * PAIR, T * K * 2 * PAIR
    # forward twice, gradients of rows and sums; the gate frozen; A B twice, gradients of A and B
    assert flops(model, x) == 2 * GATE + 4 * products + 4 * sums


def count_on_ranks():
    x, counts = torch.randn(T, M, requires_grad=True), []
    for degree, factor in itertools.product((1, 2), (0.0, 1.0)):
        exchange = ExchangeConfig(overlap_degree=degree)
        layer = MoELayer(M, E, F, top_k=K, capacity_factor=factor, seed=1, exchange=exchange)
        counts.append(flops(layer, x))
    return counts


def test_ranks_count_the_rows_that_they_compute():
    counts = run_ranks(count_on_ranks, 2)
    assert {sum(each) for each in zip(*counts, strict=True)} == {2 * 3 * (T * K * 2 * PAIR + GATE)}
