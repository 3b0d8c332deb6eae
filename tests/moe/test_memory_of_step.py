"""Memory of a step on paper against what autograd saves; in words, beside what is free."""

from pathlib import Path

import pytest
import torch
from helpers.saved import SavedBytes

from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.memory import StepMemory, free_memory

DIM, TOKENS = 32, 1024


class Own(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(DIM, 96), torch.nn.ReLU(), torch.nn.Linear(96, DIM))


CASES = {
    "padded": {"hidden_dim": 128, "capacity_factor": 1.0},
    "twice the capacity": {"hidden_dim": 128, "capacity_factor": 2.0},
    "dropless": {"hidden_dim": 128, "capacity_factor": 0.0},
    "gated": {"hidden_dim": 128, "expert_network": "swiglu", "capacity_factor": 1.0},
    "shared": {"hidden_dim": 64, "shared_expert_dim": 128, "capacity_factor": 1.0},
    "lean": {"hidden_dim": 128, "capacity_factor": 1.0, "activation_memory": "lean"},
    "minimal": {"hidden_dim": 128, "capacity_factor": 0.0, "activation_memory": "minimal"},
    "lean, fp8": {
        "hidden_dim": 128, "activation_memory": "lean", "activation_storage": "fp8",
        "expert_network": "swiglu",
    },
    "null experts": {"hidden_dim": 128, "capacity_factor": 1.0, "null_experts": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_what_autograd_saves(name):
    layer = MoELayer(DIM, 4, top_k=2, seed=1, **CASES[name]).to("meta")  # which stands for a GPU
    need = layer.memory_of_step(TOKENS)
    kept = ("rows sent and received", "inside the experts", "logits of the gate")
    predicted = sum(need.kinds[kind] for kind in kept)
    x = torch.randn(TOKENS, DIM, device="meta", requires_grad=True)
    with SavedBytes(x, *layer.parameters()) as saved:
        layer(x, return_aux=True)
    # nor are tables of the routing counted, nor that null experts are chosen unevenly
    assert 0.98 * predicted <= saved.total() <= 1.2 * predicted + 24 * 2 * TOKENS
    assert need.kinds["weights"] == sum(4 * p.numel() for p in layer.parameters())
    assert need.needed == sum(need.kinds.values()) - need.kinds["weights"]


def test_half_rows_and_experts_of_ones_own():
    built_in, own = MoELayer(DIM, 4, 96, seed=1), MoELayer(DIM, 4, expert_fn=Own, seed=1)
    assert own.memory_of_step(64).kinds == built_in.memory_of_step(64).kinds
    whole, half = (built_in.memory_of_step(64, dtype).kinds for dtype in (None, torch.float16))
    assert half["inside the experts"] * 2 == whole["inside the experts"]
    assert half["logits of the gate"] == whole["logits of the gate"] == 64 * 4 * 4


def test_in_words_beside_what_is_free(monkeypatch):
    kinds = {"weights": 3 << 30, "rows": 1 << 30, "gate": 5 << 20, "none": 0}
    words = "(weights 3.0 GiB, rows 1.0 GiB, gate 5.0 MiB)"
    for free, begin in (
        (2 << 30, f"a step needs 1.0 GiB of 2.0 GiB that are free {words}"),
        (1 << 29, "a step does NOT fit: it needs 1.0 GiB of 0.5 GiB"),
        (None, "a step needs 1.0 GiB ("),
    ):
        need = StepMemory(kinds, free, held=("weights",))
        assert str(need).startswith(begin) and need.fits == (free != 1 << 29)
    assert 0 < free_memory("cpu") < 1 << 50 and free_memory("meta") is None
    monkeypatch.setattr(Path, "exists", lambda self: False)  # no /proc
    assert free_memory("cpu") is None


@pytest.mark.parametrize("network", ["ffn", "swiglu"])
def test_bytes_per_row(network):
    def kept(mode, storage="same"):
        memory = {"activation_memory": mode, "activation_storage": storage}
        layer = MoELayer(64, 8, 256, capacity_factor=0.0, expert_network=network, **memory)
        x = torch.randn(512, 64, requires_grad=True)
        with SavedBytes(x, *layer.parameters()) as saved:
            layer(x)
        return saved.total() / (2 * 512)

    planes = 2 if network == "swiglu" else 1
    routing = kept("minimal")
    assert routing < 64  # tables and logits
    assert kept("fast") - routing == pytest.approx(4 * (2 * 64 + (planes + 1) * 256), rel=0.01)
    assert kept("lean") - routing == 4 * planes * 256
    assert kept("lean", "fp8") - routing == planes * (256 + 4)
