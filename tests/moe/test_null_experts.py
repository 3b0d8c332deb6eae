"""Null experts: outputs of the gate that lead nowhere, balanced like the others."""

import pytest
import torch

from fairseq_tutel import training
from fairseq_tutel.moe import MoELayer, routing_counts

E, N, M = 5, 3, 6


def test_a_token_of_null_experts_keeps_its_residual():
    torch.manual_seed(0)
    layer = MoELayer(M, E, 8, top_k=1, null_experts=N, capacity_factor=0.0)
    x = torch.randn(200, M)
    null_T = layer.gate.wg(x).argmax(1) >= E
    y, aux = layer(x, return_aux=True)
    assert 0 < null_T.sum() < 200
    assert torch.equal(y.any(1), ~null_T)
    assert aux.null_share.item() == pytest.approx(100 * null_T.float().mean().item())
    counts = routing_counts([aux], layer.groups)
    assert counts.load.shape == (1, E) and counts.load.sum() == (~null_T).sum()


@pytest.mark.parametrize(("rule", "rate"), [("quantile", 0.001), ("sign", 0.1)])
def test_a_load_bias_gives_them_their_share(rule, rate):
    """K * E / (E + N) experts of a token on average, whatever the gate says at first."""
    torch.manual_seed(0)
    options = {"top_k": 2, "null_experts": N, "capacity_factor": 0.0, "load_bias_rate": rate}
    layer = MoELayer(M, E, 8, load_bias=rule, **options)
    with torch.no_grad():
        layer.gate.wg.weight[E:] *= 8
    shares = []
    for _ in range(60):
        with training.collect_aux(layer) as found:
            layer(torch.randn(2000, M))
        training.update_load_bias(layer, [found])
        shares.append(found.layers[0][1].null_share.item())
    even = 100 * N / (E + N)
    assert shares[0] > even + 20
    assert shares[-1] == pytest.approx(even, abs=3)
