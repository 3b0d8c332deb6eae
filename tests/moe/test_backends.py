"""The layer on Triton kernels (interpreted without a GPU), on torch, compiled: one function."""

import logging

import pytest
import torch
from helpers.assertions import rms_ratio

from fairseq_tutel import ops
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops import backend as backend_module

CASES = {
    "top-2 with drops": dict(capacity_factor=0.5),
    "top-1": dict(top_k=1),
    "dropless top-4": dict(top_k=4, capacity_factor=0.0),
    "bounded, prioritised, normalised before": dict(
        capacity_factor=-0.5, batch_prioritized=True, normalize_before_dropping=True
    ),
    "sampling and padding": dict(second_expert_policy="sampling", use_pad_mask=True),
    "random": dict(second_expert_policy="random"),
    "z-loss, relu": dict(z_loss_weight=0.1, activation="relu"),
}


@pytest.fixture(autouse=True)
def restore_backend():
    before = ops.get_backend()
    yield
    ops.set_backend(before)
    torch._dynamo.reset()


def assert_tensors_close(got, want, tolerance):
    assert got.keys() == want.keys()
    ratios = {name: rms_ratio(got[name], want[name]) for name in want}
    assert all(ratio <= tolerance for ratio in ratios.values()), ratios


def outcome(layer, x, pad_mask, call=None):
    """Everything that a training step sees: outputs, losses, statistics and gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(5)  # of the noise of the policies
    run = layer if call is None else call
    y, aux = run(x, pad_mask=pad_mask, return_aux=True)
    (y.square().sum() + aux.loss).backward()
    result = {"y": y, "loss": aux.loss, "metrics": aux.metrics, "dx": x.grad}
    result["load"] = aux.load_E.float()
    result.update({f"d {name}": p.grad.clone() for name, p in layer.named_parameters()})
    return {name: value.detach() for name, value in result.items()}


def example(device, **options):
    torch.manual_seed(1)
    layer = MoELayer(16, 6, 24, **options).to(device)
    x = torch.randn(3, 13, 16, device=device)
    pad_mask = torch.zeros(3, 13, dtype=torch.bool, device=device)
    pad_mask[:, 10:] = True
    return layer, x, pad_mask


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_torch(name):
    layer, x, pad_mask = example("cpu", **CASES[name])
    results = {}
    for backend in ("torch", "triton"):
        ops.set_backend(backend)
        results[backend] = outcome(layer, x, pad_mask)
    assert_tensors_close(results["triton"], results["torch"], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_triton_on_a_gpu_equals_torch_on_a_cpu(name):
    if "policy" in " ".join(CASES[name]):
        layer, x, pad_mask = example("cpu", **{**CASES[name], "second_expert_policy": "all"})
    else:
        layer, x, pad_mask = example("cpu", **CASES[name])
    expected = outcome(layer, x, pad_mask)
    got = outcome(layer.cuda(), x.cuda(), pad_mask.cuda())
    assert_tensors_close({k: v.cpu() for k, v in got.items()}, expected, 1e-4)


@pytest.mark.parametrize("name", ["top-2 with drops", "dropless top-4"])
@pytest.mark.parametrize("training", [True, False])
def test_compiles_without_a_graph_break(name, training):
    layer, x, pad_mask = example("cpu", **CASES[name])
    layer.train(training)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = outcome(layer, x, pad_mask)
    assert_tensors_close(outcome(layer, x, pad_mask, call=compiled), expected, 1e-6)


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_compiles_in_a_process_that_has_not_run_it_yet(name, monkeypatch, caplog):
    """The choice of backend, not logged yet, is made inside of the traced code."""
    monkeypatch.setattr(backend_module, "_logged", set())
    ops.set_backend(name)
    layer, x, pad_mask = example("cpu", capacity_factor=1.0)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with caplog.at_level(logging.INFO, logger=backend_module.__name__):
        got = outcome(layer, x, pad_mask, call=compiled)
    assert caplog.messages == [f"MoE operators on cpu: {name} backend ({name})"]
    assert_tensors_close(got, outcome(layer, x, pad_mask), 1e-6)
