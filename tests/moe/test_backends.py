"""The layer on Triton kernels (interpreted without a GPU), on torch, compiled: one function."""

import copy
import logging

import pytest
import torch
from helpers.assertions import assert_tensors_close, rms_ratio

from fairseq_tutel import ops
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import Experts, MoELayer
from fairseq_tutel.ops import backend as backend_module


class Doubled(Experts):
    """A network of a user's own that changes what the built-in one computes."""

    def compute(self, prepared, rows, offsets):
        return 2 * super().compute(prepared, rows, offsets)


CASES = {
    "top-2 with drops": dict(capacity_factor=0.5),
    "bounded, prioritised, normalised before": dict(
        capacity_factor=-0.5, batch_prioritized=True, normalize_before_dropping=True
    ),
    "unnormalised top-3, z-loss, relu": dict(
        top_k=3, capacity_factor=0.5, unnormalized_weights=True, z_loss_weight=0.1,
        activation="relu",
    ),
    "sampling and padding": dict(second_expert_policy="sampling", use_pad_mask=True),
    "random": dict(second_expert_policy="random"),
    "gated with biases": dict(expert_network="swiglu", expert_options={"bias": True}),
    "network of a user's own": dict(capacity_factor=0.0, own=True),
    "bias in a frozen layer": dict(capacity_factor=0.0, frozen=True),
    "clamped with biases": dict(
        expert_network="clamped_swiglu", expert_options={"bias": True}, capacity_factor=0.0
    ),
    "null and shared experts, outputs masked": dict(
        null_experts=3, shared_expert_dim=10, expert_output_masking=0.2, final_output_masking=0.2
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def restore_backend():
    before = ops.get_backend()
    yield
    ops.set_backend(before)
    torch._dynamo.reset()


def outcome(layer, x, pad_mask, call=None):
    """Everything that a training step sees: outputs, losses, statistics and gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(5)  # of the noise of the policies
    run = layer if call is None else call
    y, aux = run(x, pad_mask=pad_mask, return_aux=True)
    (y.square().sum() + aux.loss).backward()
    result = {"y": y, "loss": aux.loss, "dx": x.grad}
    result["metrics"] = torch.tensor(list(aux.metrics_dict().values()))
    result["load"] = aux.load_E.float()
    result |= {f"d {n}": p.grad for n, p in layer.named_parameters() if p.requires_grad}
    return {name: value.detach().clone() for name, value in result.items()}


def example(device, own=False, frozen=False, **options):
    torch.manual_seed(1)
    layer = MoELayer(16, 6, 24, **options).to(device)
    if own:
        layer.experts.__class__ = Doubled
    x = torch.randn(2, 9, 16, device=device)
    pad_mask = torch.zeros(2, 9, dtype=torch.bool, device=device)
    pad_mask[:, 7:] = True
    if frozen:
        layer.experts.fc2_bias.requires_grad_(False)
    return layer, x, pad_mask


TRITON = [
    pytest.param("cpu", marks=pytest.mark.interpreted),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("name", CASES)
def test_triton_equals_torch(name, device):
    options = dict(CASES[name])
    if device == "cuda" and "second_expert_policy" in options:
        options["second_expert_policy"] = "all"  # a GPU draws other numbers
    layer, x, pad_mask = example("cpu", **options)
    ops.set_backend("torch")
    want = outcome(layer, x, pad_mask)
    ops.set_backend("triton")
    got = outcome(*(each.to(device) for each in (layer, x, pad_mask)))
    assert_tensors_close(got, want, 1e-5 if device == "cpu" else 1e-4)


def twins(dtype, device, autocast=False, **options):
    """(layer on the device, its fp64 twin); widths fit torch's grouped product."""
    torch.manual_seed(1)
    layer = MoELayer(16, 6, 32, **options).to(device, dtype)
    exact = copy.deepcopy(layer).double()
    return layer.float() if autocast else layer, exact


def run_twin(layer, x, target, autocast=None):
    """Outputs and gradients of a step; ``autocast`` is the dtype of one, if any."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        y, aux = layer(x, return_aux=True)
    ((y.double() * target.double()).sum() + aux.loss).backward()
    grads = {"dx": x.grad, **{f"d {name}": p.grad for name, p in layer.named_parameters()}}
    return y.detach(), aux, grads


@pytest.mark.parametrize(("device", "backend"), [
    ("cpu", "torch"),
    pytest.param("cpu", "triton", marks=pytest.mark.interpreted),
    pytest.param("cuda", "triton", marks=pytest.mark.gpu),
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "autocast", "factor"), [  # 0: dropless
    (torch.float16, False, 1.0), (torch.float16, True, 0.0), (torch.float32, False, 0.0),
    (torch.bfloat16, False, 0.0), (torch.bfloat16, True, 1.0),
], ids=str)  # fmt: skip
def test_each_dtype_equals_fp64_to_its_rounding(dtype, autocast, factor, device, backend):
    layer, exact = twins(dtype, device, autocast, capacity_factor=factor)
    x, target = (torch.randn(2, 9, 16).to(device, dtype) for _ in range(2))
    ops.set_backend("torch")
    want, want_aux, want_grads = run_twin(exact, x.double(), target)
    ops.set_backend(backend)
    given = x.float() if autocast else x
    y, aux, grads = run_twin(layer, given, target, dtype if autocast else None)
    unit = max(torch.finfo(dtype).eps, 2e-6)  # fp32 sums in any order
    assert y.dtype == dtype and aux.loss.dtype == torch.float32
    # fp32 logits of the same numbers: the same decisions
    assert torch.equal(aux.load_E, want_aux.load_E) and rms_ratio(aux.loss, want_aux.loss) < 2e-6
    assert rms_ratio(y, want) < 2 * unit
    for name, grad in grads.items():
        assert grad.dtype == given.dtype and rms_ratio(grad, want_grads[name]) < 4 * unit, name


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("torch", "clamped with biases"),
        pytest.param(
            "triton", "top-2 with drops", marks=[pytest.mark.interpreted, pytest.mark.long]
        ),
    ],
)
def test_compiles_in_a_process_that_has_not_run_it_yet(name, case, monkeypatch, caplog):
    """The choice of backend, not logged yet, is made inside of the traced code."""
    monkeypatch.setattr(backend_module, "_chosen", {})
    ops.set_backend(name)
    layer, x, pad_mask = example("cpu", **CASES[case])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with caplog.at_level(logging.INFO, logger=backend_module.__name__):
        got = outcome(layer, x, pad_mask, call=compiled)
    assert caplog.messages == [f"MoE operators on cpu: {name} backend ({name})"]
    assert_tensors_close(got, outcome(layer, x, pad_mask), 1e-6)
    layer.eval()
    got = outcome(layer, x, pad_mask, call=compiled)
    assert_tensors_close(got, outcome(layer, x, pad_mask), 1e-6)


# T, M, F, E, ranks that are simulated
LARGE = {"padded": (5000, 4096, 16384, 512, 512), "dropless": (5000, 4096, 16384, 4, 0)}
FACTOR = {"padded": 1.25, "dropless": 0.0}


def clear_tokens(layer, count, dtype):
    """[count, M] tokens whose three largest logits are well apart."""
    x = torch.randn(2 * count, layer.model_dim, device="cuda").to(dtype)
    logits = x.double() @ layer.gate.wg.weight.detach().double().t()
    best = logits.topk(3, dim=1).values
    chosen = x[(best[:, :-1] - best[:, 1:]).amin(dim=1) > 1e-4]
    assert len(chosen) >= count
    return chosen[:count]


def large_rms_ratio(got, want):
    """Of the error, computed where the tensors are: there are billions of elements."""
    return ((got.detach().double() - want.detach()).norm() / want.detach().norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LARGE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_layer_of_a_real_size_equals_fp64(dtype, layout):
    """Tuned tiles included. No tokens whose choices rounding would decide."""
    tokens, model_dim, hidden_dim, experts, ranks = LARGE[layout]
    torch.manual_seed(1)
    groups = build_groups(experts, simulate_world_size=ranks)
    with torch.device("cuda"):
        layer = MoELayer(model_dim, experts, hidden_dim, capacity_factor=FACTOR[layout], seed=1,
                         groups=groups)  # fmt: skip
    layer = layer.to(dtype)
    exact = copy.deepcopy(layer).double()
    x = clear_tokens(layer, tokens, dtype)
    target = torch.randn_like(x)
    ops.set_backend("triton")
    y, aux, grads = run_twin(layer, x, target)
    ops.set_backend("torch")
    want, want_aux, want_grads = run_twin(exact, x.double(), target)
    assert torch.equal(aux.load_E, want_aux.load_E) and aux.load_E.sum() == 2 * tokens
    unit = torch.finfo(dtype).eps
    assert y.dtype == dtype and large_rms_ratio(y, want) < 2 * unit
    for key, grad in grads.items():
        assert grad.dtype == dtype and large_rms_ratio(grad, want_grads[key]) < 4 * unit, key
