"""Seeds of dropout, and that a training step with dropout never waits for the GPU."""

import pytest
import torch
from helpers.gpu import no_waiting
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops.expert_ffn import dropout_seed


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**53 + 1, -(2**63), 2**63 - 1])
def test_every_int64_is_a_seed(seed):
    tensor = dropout_seed(0.1, seed, torch.device("cpu"))
    assert tensor.dtype == torch.int64 and tensor.shape == () and tensor.item() == seed


def test_seeds_are_made_where_they_are_needed(monkeypatch):
    """torch.tensor(seed, device=...) would wait: it copies from pageable memory to a GPU."""
    cpu, given = torch.device("cpu"), torch.tensor(3)
    monkeypatch.setattr(torch, "tensor", None)
    assert dropout_seed(0.1, 7, cpu).item() == 7
    assert dropout_seed(0.1, given, cpu) is given and dropout_seed(0.0, 3, cpu) is None


# What the layer documents as reading back to the host does not occur here: ragged rows on several
# ranks, recorded exchange times, custom experts with ragged rows, metrics_dict.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "routing",
    [
        {"top_k": 2},
        {"top_k": 2, "batch_prioritized": True, "second_expert_policy": "random"},
        {"top_k": 3, "gate_noise": 1.0, "input_jitter": 0.01, "input_dropout": 0.1},
        {"top_k": 2, "second_expert_policy": "sampling", "z_loss_weight": 0.1},
        {"top_k": 2, "gate_noise": 1.0, "load_importance_loss": True},
        {"top_k": 2, "router": "cosine"},
        {"top_k": 2, "capacity_factor": 0.0, "recompute": True},
        {"top_k": 2, "sizes": (5000, 4096, 16384, 8)},
        {"top_k": 2, "sizes": (5000, 4096, 16384, 8), "capacity_factor": 0.0},
    ],
    ids=lambda routing: "-".join(routing),
)
def test_a_training_step_does_not_wait_for_the_gpu(routing, dtype):
    options = {"capacity_factor": 1.25, "dropout": 0.1, "activation_dropout": 0.1, **routing}
    recompute = options.pop("recompute", False)
    tokens, dim, hidden, experts = options.pop("sizes", (96, 64, 128, 8))
    with torch.device("cuda"):
        groups = build_groups(experts, simulate_world_size=experts if tokens > 96 else 0)
        if not options["capacity_factor"]:
            groups = None  # ragged rows of several ranks are counted on the host
        layer = MoELayer(dim, experts, hidden, groups=groups, **options).to(dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(tokens, dim, device="cuda", dtype=dtype, requires_grad=True)
    pad_mask = torch.zeros(tokens, dtype=torch.bool, device="cuda")

    def run(x):
        y, aux = layer(x, pad_mask=pad_mask, return_aux=True)
        return y, aux.loss

    def step():
        optimizer.zero_grad()
        y, loss = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
        (y.float().square().mean() + 0.01 * loss).backward()
        optimizer.step()

    step()  # compiles the kernels
    with no_waiting():
        step()
