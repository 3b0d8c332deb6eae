"""Reports of padded batches, beside those of their real tokens alone."""

import pytest
import torch
from helpers.distributed import on_ranks

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoELayer

DIM, EXPERTS = 8, 4
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
    """Return losses, gradients, counts and metrics of a pass through a layer."""
    layer = MoELayer(DIM, EXPERTS, 8, seed=0, **{"capacity_factor": 0.0, **options})
    with torch.no_grad():
        layer.gate.wg.weight.copy_(torch.linspace(-1, 1, layer.gate.wg.weight.numel()).sin_().view(
            layer.gate.wg.weight.shape
        ))  # fmt: skip
    with training.collect_aux(layer, **padding) as aux:
        y = layer(x)
    aux.loss.backward()
    found = {"loss": aux.loss, "gradient": layer.gate.wg.weight.grad, "load": aux.load[""]}
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
