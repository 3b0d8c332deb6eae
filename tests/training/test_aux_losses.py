"""Reports beside counts of the best choices in numpy; of padded batches beside real tokens."""

import numpy as np
import pytest
import torch
from helpers.distributed import on_ranks, run_ranks
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoELayer

DIM, ROWS, K, EXPERTS = 8, 12, 2, 4


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


def load(layer, rank):
    logits = (batch(rank) @ layer.gate.wg.weight.detach().t()).double().numpy()
    best = np.argsort(-logits, axis=1)[:, :K]
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
    (rank, world_size), model = process_world(), Model()
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


RIGHT = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
LEFT = [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
# Options of the layer. The capacity is that of all places, and real tokens come first.
OPTIONS = {
    "softmax": {},
    "all choices": {"balance_choices": "all", "z_loss_weight": 0.1},
    "sigmoid, sign": {"score_function": "sigmoid", "load_bias": "sign"},
    "quantile": {"load_bias": "quantile"},
    "null experts": {"null_experts": 2},
    "all ranks": {"balance_scope": "global"},
    "update": {"balance_scope": "update"},
    "dropped": {"top_k": 1, "capacity_factor": 0.5},
    "re-routed": {"top_k": 1, "capacity_factor": 0.5, "overflow_rerouting": 1},
}


def report(options, x, **padding):
    """Output, and losses, gradients, counts and metrics, of a pass through a layer."""
    layer = MoELayer(DIM, EXPERTS, 8, seed=0, **{"capacity_factor": 0.0, **options})
    with torch.no_grad():
        weight = layer.gate.wg.weight
        weight.copy_(torch.linspace(-1, 1, weight.numel()).sin_().view_as(weight))
    with training.collect_aux(layer, **padding) as aux:
        y = layer(x)
    aux.loss.backward()
    found = {"loss": aux.loss, "gradient": layer.gate.wg.weight.grad, "load": aux.load[""]}
    found["kept"] = aux.layers[0][1].num_kept_per_expert_E
    metrics = {**aux.metrics_dict(), **aux.utilisation()}
    metrics.pop("moe_util_slot")  # of all rows of the buffers
    found |= {name: torch.tensor(value) for name, value in metrics.items()}
    if layer.config.moves_load_bias:
        training.update_load_bias(layer, [aux])
        found["bias"] = layer.gate.load_bias
    return y, found


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_padded_batch_reports_its_real_tokens(options, mask, flat):
    mask = torch.tensor(mask if options.get("top_k", 2) > 1 else [RIGHT[1]])
    x, alone = torch.randn(*mask.shape, DIM), dict(options)
    if alone.get("capacity_factor"):  # the same rows of an expert
        alone["capacity_factor"] *= mask.numel() / int(mask.sum())
    y, want = report(alone, x[mask.bool()])
    given = x.flatten(0, 1) if flat else x
    full, _ = report(options, given)
    routed, found = report(options, given, attention_mask=mask)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(routed, full)  # padding is routed as before
    skipped, found = report(options, given, attention_mask=mask, skip_padding=True)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    skipped = skipped.view_as(x)
    torch.testing.assert_close(skipped[mask.bool()], y, rtol=1e-6, atol=1e-6)
    assert not skipped[mask == 0].any()


@on_ranks(2)
def test_ranks_with_other_padding_balance_their_real_tokens():
    rank, _ = process_world()
    masks = torch.tensor([RIGHT, LEFT])
    x = torch.randn(2, *masks.shape[1:], DIM, generator=torch.Generator().manual_seed(3))
    options = {"balance_scope": "global"}
    _, found = report(options, x[rank], attention_mask=masks[rank], skip_padding=bool(rank))
    _, want = report(options, x[rank][masks[rank].bool()])
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def test_calls_of_a_layer_are_a_mean_by_their_tokens():
    layer, x = MoELayer(DIM, EXPERTS, 8, capacity_factor=0.0), torch.randn(2, 6, DIM)
    with training.collect_aux(layer, "by_token") as aux:
        layer(x[0])
        layer(x[1, :2])
    losses = [report.loss for _, report in aux.layers]
    torch.testing.assert_close(aux.loss, (6 * losses[0] + 2 * losses[1]) / 8)
