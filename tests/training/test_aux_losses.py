"""What collect_aux yields, beside counts of the gates' best choices in numpy."""

import numpy as np
import pytest
import torch
from helpers.distributed import run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoELayer

DIM, ROWS, K = 8, 12, 2


class Model(nn.Module):
    """Layers of different sizes, one of them without dropping."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.few = MoELayer(DIM, 4, 8, top_k=K, capacity_factor=0.0, seed=1)
        self.many = MoELayer(DIM, 8, 8, top_k=K, capacity_factor=0.5, seed=2)

    def forward(self, x):
        return self.few(x) + self.many(x)


def batch(rank):
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(rank))


def logits(layer, rank):
    return (batch(rank) @ layer.gate.wg.weight.detach().t()).double().numpy()


def load(layer, rank):
    best = np.argsort(-logits(layer, rank), axis=1)[:, :K]
    return np.bincount(best.flatten(), minlength=layer.config.num_experts)


def kept(layer, rank):
    """The same after dropping: a rank's rows of an expert are at most its capacity."""
    capacity = layer.config.capacity(ROWS, True)
    return load(layer, rank) if capacity is None else np.minimum(load(layer, rank), capacity)


def utilisation(layer, ranks):
    load_E = sum(load(layer, rank) for rank in range(ranks))
    kept_E = sum(kept(layer, rank) for rank in range(ranks))
    received_W = kept_E.reshape(ranks, -1).sum(1)
    slots = layer.config.num_experts * (layer.config.capacity(ROWS, True) or 0) * ranks
    return [
        100 * kept_E.sum() / slots if slots else 0,
        100 * load_E.mean() / load_E.max(),
        100 * received_W.mean() / received_W.max(),
        100 * (1 - kept_E.sum() / load_E.sum()),
        (load_E == 0).sum(),
    ]


def check():
    rank, world_size = process_world()
    model = Model()
    layers = {"few": model.few, "many": model.many}
    net = training.wrap_data_parallel(model) if world_size > 1 else model
    reports = [layer(batch(rank), return_aux=True)[1] for layer in layers.values()]
    losses = [report.loss for report in reports]
    for combine, wanted in (("sum", sum(losses)), ("average", sum(losses) / 2)):
        with training.collect_aux(net, combine) as aux:
            net(batch(rank))
        torch.testing.assert_close(aux.loss, wanted)
        assert aux.loss.requires_grad
    assert [name for name, _ in aux.layers] == list(aux.by_name) == list(layers)
    for name, layer in layers.items():
        assert aux.load[name].tolist() == load(layer, rank).tolist()
    wanted = np.mean([report.metrics_dict()["entropy_gating"] for report in reports])
    assert aux.metrics_dict()["entropy_gating"] == pytest.approx(wanted, rel=1e-5)
    names = ["moe_util_slot", "moe_util_load", "moe_util_rank", "moe_drop", "moe_dead"]
    wanted = np.mean([utilisation(layer, world_size) for layer in layers.values()], 0)
    assert wanted[3] > 0  # some were dropped
    used = aux.utilisation()
    assert used == pytest.approx(dict(zip(names, wanted, strict=True)), rel=1e-6)
    with training.collect_aux(net) as aux:  # the same as if it came in one pass
        net(batch(rank))
        net(batch(rank))
    assert aux.load["few"].sum() == 2 * K * ROWS
    assert aux.utilisation() == pytest.approx(used, rel=1e-6)
    return used


def test_losses_counts_and_metrics_of_all_layers():
    check()
    used, again = run_ranks(check, 2)
    assert used == again
