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


def stack(groups, device):
    torch.manual_seed(3)
    return [MoELayer(M, EXPERTS, HIDDEN, capacity_factor=factor, groups=groups, seed=number)
            .to(device) for number, factor in enumerate(FACTORS)]  # fmt: skip


def train(layers, x, target):
    """Two steps of a residual stack, its layers recomputed; [output, dx, gate gradients, loads]."""
    x = x.clone().requires_grad_()
    loads = []

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


def _inputs():
    torch.manual_seed(5)
    return torch.randn(sum(TOKENS), M), torch.randn(sum(TOKENS), M)


def _on_ranks(device):
    rank, _ = process_world()
    x, target = (t.split(TOKENS)[rank].to(device) for t in _inputs())
    return train(stack(build_groups(EXPERTS), device), x, target)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_on_one_device_equal_one_rank(device):
    layers = stack(ExpertParallelGroups(EXPERTS), "cpu")
    y, dx, gates, loads = train(layers, *_inputs())
    parts = run_ranks(_on_ranks, 2, device, timeout=60 if device == "cpu" else 90)
    assert rms_ratio(torch.cat([part[0] for part in parts]), y) < 1e-5
    assert rms_ratio(torch.cat([part[1] for part in parts]), dx) < 1e-5
    assert rms_ratio(sum(part[2] for part in parts), gates) < 1e-5
    assert torch.equal(sum(part[3] for part in parts), loads)
