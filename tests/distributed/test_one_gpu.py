"""Two ranks that share a device, connected by gloo: every rank exchanges in the same order.

On a GPU, where the backward pass has its own thread, an early exchange meets the wrong partner.
"""

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.distributed import ExpertParallelGroups, build_groups, process_world
from fairseq_tutel.moe import MoELayer

M, HIDDEN, EXPERTS, TOKENS = 16, 24, 4, (17, 9)
FACTORS = (8.0, 0.0, 8.0, 0.0)  # padded and ragged in turn; nothing is dropped


def train(groups, device, mine):
    """Two steps of a residual stack, its layers recomputed; [output, dx, gate gradients, loads]."""
    torch.manual_seed(3)
    layers = [
        MoELayer(M, EXPERTS, HIDDEN, capacity_factor=factor, groups=groups, seed=seed).to(device)
        for seed, factor in enumerate(FACTORS)
    ]
    x, target = (part[mine].to(device) for part in torch.randn(2, sum(TOKENS), M))
    x, loads = x.requires_grad_(), []

    def run(layer, h):
        y, aux = layer(h, return_aux=True)
        loads.append(aux.load_E)
        return h + y

    for _ in range(2):
        h = x
        for number, layer in enumerate(layers):
            # every other layer again in the backward pass
            h = checkpoint(run, layer, h, use_reentrant=False) if number % 2 else run(layer, h)
        (h * target).sum().backward()
    gates = torch.stack([layer.gate.wg.weight.grad for layer in layers])
    return [t.detach().cpu() for t in (h, x.grad, gates, torch.stack(loads[: len(layers)]))]


def _on_ranks(device):
    rank, _ = process_world()
    mine = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    return train(build_groups(EXPERTS), device, mine)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_on_one_device_equal_one_rank(device):
    want = train(ExpertParallelGroups(EXPERTS), "cpu", slice(None))
    parts = run_ranks(_on_ranks, 2, device, timeout=90)
    y, dx, gates, loads = zip(*parts, strict=True)
    found = torch.cat(y), torch.cat(dx), sum(gates), sum(loads)
    assert all(rms_ratio(*pair) < 1e-5 for pair in zip(found, want, strict=True))
