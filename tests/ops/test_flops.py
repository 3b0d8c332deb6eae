"""FLOPs that torch's counter finds in a layer, against its count of an equal dense loop."""

import functools
import itertools

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.inputs import random_rows
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training import add_lora

T, K, E, M, F = 12, 2, 4, 16, 32
DROPLESS = {"capacity_factor": 0.0}


class DenseLoop(nn.Module):
    """The gate, and experts that take equal shares of ``rows``, one after the other."""

    def __init__(self, rows=T * K, gated=False, shared=0):
        super().__init__()
        self.rows, self.gated, width = rows, gated, 2 * F if gated else F
        self.gate = nn.Linear(M, E, bias=False)
        pairs = [(nn.Linear(M, width), nn.Linear(F, M)) for _ in range(E)]
        self.experts = nn.ModuleList(map(nn.ModuleList, pairs))
        self.shared = nn.ModuleList([nn.Linear(M, shared), nn.Linear(shared, M)] if shared else [])

    def forward(self, x):
        y = self.gate(x).sin().sum()
        for fc1, fc2 in self.experts:
            hidden = fc1(x[:1].expand(self.rows // E, M).sin()).sin()
            if self.gated:
                hidden = torch.mul(*hidden.chunk(2, 1))
            y = y + fc2(hidden).sin().sum()
        for fc in self.shared:
            x = fc(x.sin())
        return x.sum() + y


def flops(call, x, backward=True):
    """Count a forward pass, and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        y = call(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


CASES = {
    "dropless": (DROPLESS, {}),
    "padded, of which half is unused": ({"capacity_factor": 2.0}, {"rows": 2 * T * K}),
    "gated, dropless": ({"expert_network": "swiglu", **DROPLESS}, {"gated": True}),
    "gated, padded": ({"expert_network": "geglu"}, {"gated": True}),
    "not in our operators": ({"expert_network": "clamped_swiglu"}, {"gated": True}),
    "shared expert": ({"shared_expert_dim": 48, **DROPLESS}, {"shared": 48}),
    "fp8": ({"expert_compute": "fp8", **DROPLESS}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_counts_as_a_dense_loop(case):
    """In training, with checkpoints, on tokens without a gradient, and in evaluation."""
    options, dense = CASES[case]
    layer, loop = MoELayer(M, E, F, top_k=K, seed=1, **options), DenseLoop(**dense)
    x, grad = torch.randn(T, M), torch.randn(T, M, requires_grad=True)
    for tokens in (x, grad):
        assert flops(layer, tokens) == flops(loop, tokens) > 0
    for reentrant in (False, True):
        checkpointed = (
            functools.partial(checkpoint, each, use_reentrant=reentrant) for each in (layer, loop)
        )
        ours, want = (flops(call, grad) for call in checkpointed)
        assert ours == want
    with torch.no_grad():
        assert flops(layer, x, backward=False) == flops(loop, x, backward=False)
    layer.experts.requires_grad_(False), loop.experts.requires_grad_(False)
    layer.gate.requires_grad_(False), loop.gate.requires_grad_(False)
    assert flops(layer, grad) == flops(loop, grad)


@pytest.mark.interpreted
def test_kernels_count_the_same(backend):
    """Experts that read tokens where they are."""
    backend("triton")
    layer = MoELayer(M, E, F, top_k=K, expert_network="swiglu", **DROPLESS)
    x = torch.randn(T, M, requires_grad=True)
    assert flops(layer, x) == flops(DenseLoop(gated=True), x)


@pytest.mark.parametrize(("kept", "again"), [("lean", 0), ("minimal", 2 * T * K * M * F)])
def test_an_operator_that_computes_again_counts_it(kept, again):
    maps = *random_rows(T, K, E, T * K // E, "spread"), torch.zeros(T, K, dtype=torch.int32)
    shapes = (T, M), (T, K), (E, F, M), (E, F), (E, M, F), (E, M)
    x, weight, *params = (torch.randn(shape, requires_grad=True) for shape in shapes)
    how = {"options": ops.FFNOptions("gelu", (0.0, 0.0)), "memory": ops.ActivationMemory(kept)}
    given = weight, *maps, *params
    counted = flops(lambda x: ops.routed_ffn(x, *given, offsets=None, **how), x)
    assert counted == 3 * 2 * T * K * 2 * M * F + again


def test_low_rank_updates():
    """The counter hooks the experts, which then run twice, with gradients of the summed weights."""
    rank = 4
    model = nn.Sequential(MoELayer(M, E, F, top_k=K, **DROPLESS))
    add_lora(model, rank=rank)
    frozen = DenseLoop().requires_grad_(False)
    x = torch.randn(T, M, requires_grad=True)
    sums, product = 2 * E * rank * 2 * M * F, 2 * T * K * 2 * M * F
    # forward twice, gradients of rows (as frozen) and sums; A B twice, gradients of A and B
    assert flops(model, x) == flops(frozen, x) + 2 * product + 4 * sums


def count_on_ranks():
    x, counts = torch.randn(T, M, requires_grad=True), []
    for degree, factor in itertools.product((1, 2), (0.0, 1.0)):
        exchange = ExchangeConfig(overlap_degree=degree)
        layer = MoELayer(M, E, F, top_k=K, capacity_factor=factor, seed=1, exchange=exchange)
        counts.append(flops(layer, x))
    return counts


def test_ranks_count_the_rows_that_they_compute():
    counts, x = run_ranks(count_on_ranks, 2), torch.randn(T, M, requires_grad=True)
    assert {sum(each) for each in zip(*counts, strict=True)} == {2 * flops(DenseLoop(), x)}
