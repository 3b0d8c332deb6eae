"""Adaptive parallelism of Tutel's paper (arXiv 2206.03382), bracketed by the planner, not fitted.

Figure 12: 64 A100, 16 experts, D = 2048, either 4096 tokens per GPU and H = 2048 or 1024 and 32768,
capacity factor 1 to 8. Assumed: top-2; fp32 at 71 TFLOP/s, as table 2's 371.8 ms of products are;
no overlap; gradients scattered by rings, as NCCL does. One layer, both passes, is compared.
"""

import dataclasses
import itertools

import pytest
from claims_layer import LayerShape
from claims_predictions import times_of_r

from fairseq_tutel.command_line import CONFIGS
from fairseq_tutel.plan import speed
from fairseq_tutel.plan.hardware import load_hardware

A100 = dataclasses.replace(
    load_hardware(CONFIGS, "a100-80g"), fp32_flops=71e12, matmul_efficiency=1.0
)
NETWORKS = {
    "a port per GPU": A100,
    "NVLink everywhere": dataclasses.replace(A100, gpus_per_node=64),
    "a port per node": dataclasses.replace(A100, network_bandwidth=A100.network_bandwidth / 8),
}
LARGE, BASE = (1024, 32768), (4096, 2048)


@pytest.fixture(scope="module")
def seconds():
    """Of a layer, by (tokens, H), network, capacity factor and r."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(speed, "scatter_time", speed.gather_time)
    found = {}
    for (tokens, hidden), factor in itertools.product((LARGE, BASE), (1, 2, 4, 8)):
        shape = LayerShape(tokens, 2048, hidden, experts=16, gpus=64, capacity_factor=factor)
        for network, hardware in NETWORKS.items():
            times = found.setdefault(((tokens, hidden), network), {})
            times[factor] = times_of_r(shape, hardware)
    monkeypatch.undo()
    return found


def ratios(by_factor, r=None):
    """Time of the slowest r (or of one r) over that of the fastest, by capacity factor."""
    return [
        (max(times.values()) if r is None else times[r]) / min(times.values())
        for times in by_factor.values()
    ]


def test_more_tokens_want_fewer_slices(seconds):
    """Its trend: r > 1 for wide experts and little capacity, weights travel for narrow ones."""
    best = [min(times, key=times.get) for times in seconds[LARGE, "a port per GPU"].values()]
    assert best == [4, 2, 2, 1]
    best = [min(times, key=times.get) for times in seconds[BASE, "a port per GPU"].values()]
    assert best == [0, 0, 0, 0]


def test_the_gain_of_switching_is_within_what_networks_give(seconds):
    """1.74 times by adaptive parallelism (abstract of its first version), against r = 1."""
    ports = ratios(seconds[LARGE, "a port per GPU"], 1)
    assert ports == pytest.approx([1.87, 1.30, 1.11, 1.00], abs=0.01)
    inside = ratios(seconds[LARGE, "NVLink everywhere"], 1)
    assert inside == pytest.approx([1.09, 1.03, 1.01, 1.00], abs=0.01)
    assert max(inside) < 1.74 < max(ports)


def test_the_worst_choice_against_the_best(seconds):
    """1.35 to 14.57 times (section 1). A port per GPU gives 1.2 to 8.3, one per node up to 32."""
    spread = {
        network: ratios(seconds[LARGE, network]) + ratios(seconds[BASE, network])
        for network in NETWORKS
    }
    ports, shared = spread["a port per GPU"], spread["a port per node"]
    assert [min(ports), max(ports)] == pytest.approx([1.23, 8.32], abs=0.01)
    assert min(ports) < 1.35 and max(ports) < 14.57 < max(shared) < 32
