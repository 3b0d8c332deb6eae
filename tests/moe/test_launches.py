"""What a padded layer asks of a GPU: few operations, 5 to 10 us of the host each, and no reads."""

import pytest
import torch
from helpers.dispatched import Dispatched
from helpers.gpu import no_waiting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

MOST = 25  # dispatched operations each way, views included


def make(device, dtype=torch.bfloat16, dim=64, **options):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            layer = MoELayer(dim, 8, 2 * dim, seed=1, **options)
            return layer, torch.randn(32, dim, requires_grad=True)
    finally:
        torch.set_default_dtype(before)


def step(layer, x):
    """(operations of the forward pass, of the backward pass), outermost ones."""
    with Dispatched() as forward:
        y, aux = layer(x, return_aux=True)
    gradients = [torch.ones_like(y), torch.ones_like(aux.loss)]
    with Dispatched() as backward:
        torch.autograd.backward([y, aux.loss], gradients)
    return forward.names, backward.names


FEW = [
    {}, {"top_k": 1}, {"balance_over": "all"}, {"dropout": 0.1, "activation_dropout": 0.1},
    {"normalize_before_dropping": True, "eval_capacity_factor": 1.0}, {"capacity_factor": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("options", FEW, ids=lambda options: "-".join(options) or "top2")
def test_few_operations_are_dispatched(options):
    layer, x = make("meta", **options)
    forward, backward = step(layer, x)
    extra = 5 if "normalize_before_dropping" in options else 0
    assert len(forward) <= MOST + extra, forward
    assert len(backward) <= MOST + 2 * extra, backward
    operators = {"gate_logits", "topk_gating", "assign_rows", "expert_ffn"}
    assert operators <= set(forward)
    assert {f"{name}_bwd" for name in operators} <= set(backward)
    assert all(p.grad.stride() == p.stride() for p in layer.parameters())
    assert "clone" not in backward


ROUTINGS = [
    {"top_k": 2, "balance_over": "all"},
    {"top_k": 1, "dropout": 0.1, "activation_dropout": 0.1},
    {"top_k": 2, "batch_prioritized": True, "second_expert_policy": "random"},
    {"top_k": 3, "gate_noise": 1.0, "input_jitter": 0.01, "input_dropout": 0.1},
    {"top_k": 2, "second_expert_policy": "sampling", "z_loss_weight": 0.1},
    {"top_k": 2, "gate_noise": 1.0, "load_importance_loss": True},
    {"top_k": 2, "router": "cosine"},
    {"top_k": 2, "load_bias": "quantile", "balance_over": "all"},
    {"top_k": 2, "load_bias": "sign", "score_function": "sigmoid", "route_scale": 2.0},
    {"top_k": 2, "balance_scope": "sequence", "balance_choices": "all"},
    {"top_k": 2, "overflow_rerouting": 2, "drop_policy": "probability"},
    {"top_k": 2, "capacity_factor": 0.0},
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", ROUTINGS, ids="-".join)
def test_nothing_is_read_by_the_host(options, device):
    """A fake tensor has a shape and no values: reading one is an error."""
    autocast = ROUTINGS.index(options) % 2 == 1
    with FakeTensorMode():
        layer, x = make(device, torch.float32 if autocast else torch.bfloat16, **options)
        pad_mask = torch.zeros(32, dtype=torch.bool, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y, aux = layer(x, pad_mask=pad_mask, return_aux=True)
        (y.float().square().mean() + 0.01 * aux.loss).backward()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            aux.load_E.sum().item()
        assert x.grad.shape == x.shape and x.grad.device.type == device


LARGE = {"sizes": (5000, 4096, 16384, 8)}  # tokens, model and hidden width, experts


WAITING = [
    {"top_k": 2}, *ROUTINGS[2:7], {"capacity_factor": 0.0, "recompute": True}, LARGE,
    {**LARGE, "capacity_factor": 0},
]  # fmt: skip


# What the layer documents as reading back to the host does not occur here: ragged rows on several
# ranks, recorded exchange times, custom experts with ragged rows, metrics_dict.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", WAITING, ids="-".join)
def test_a_training_step_does_not_wait_for_the_gpu(routing, dtype):
    options = {"capacity_factor": 1.25, "dropout": 0.1, "activation_dropout": 0.1, **routing}
    recompute = options.pop("recompute", False)
    tokens, dim, hidden, experts = options.pop("sizes", (96, 64, 128, 8))
    groups = build_groups(experts, simulate_world_size=experts if tokens > 96 else 0)
    if not options["capacity_factor"]:
        groups = None  # ragged rows of several ranks are counted on the host
    with torch.device("cuda"):
        layer = MoELayer(dim, experts, hidden, groups=groups, **options).to(dtype)
        x = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
        pad_mask = torch.zeros(tokens, dtype=torch.bool)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

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
