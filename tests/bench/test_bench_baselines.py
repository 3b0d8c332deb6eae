"""Baselines and formulas of the benchmarks, each against a count or a loop of its own."""

import pytest
import torch
from dense_reference import DenseMoE
from helpers.assertions import assert_close
from helpers.benchmarks import program
from layers import PRESETS, Inputs, LayerShape, experts_alone, make_layer
from torch.utils.flop_counter import FlopCounterMode

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import ExpertRows, MoELayer


def test_predictions(monkeypatch):
    """Products by hand; the review's estimate for meta-1.1t on an H200."""
    import predict

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for name in (
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA B200",
        "AMD Instinct MI300X",
        "RTX",
        "NVIDIA H200",
    ):
        rates = predict.rates_of(torch.device("cuda", 0))
        assert (rates is None) == (name == "RTX")
    assert predict.rates_of(torch.device("cpu")) is None and predict.beside(2.0, None) == {}
    ms = predict.layer_ms(PRESETS["meta-1.1t"].shape, rates)
    rows = 49152  # 512 ranks x 96 slots
    assert ms["products"] == pytest.approx(1e3 * 12 * rows * 4096 * 16384 / (0.78 * 989e12))
    assert 1.08 < ms["triton"] / ms["products"] < 1.13
    assert ms["products"] < ms["experts"] < ms["triton"] < ms["dense"]


def test_experts_alone_are_the_layers():
    """The baseline's loop returns what the layer's experts return, outputs and gradients."""
    shape, device = LayerShape(48, 16, 24, 4), torch.device("cpu")
    layer, inputs = make_layer(shape, device), Inputs(shape, device, seed=1)
    rows, d_rows = (list(torch.randn(3, 4, 24, 16)) for _ in range(2))
    case = experts_alone(layer, rows, d_rows, inputs)
    case.begin()
    outputs = case.run(0)
    want = layer.experts(ExpertRows(rows[0]))
    torch.testing.assert_close(torch.stack(list(outputs)), want)
    got = [leaf.grad for leaf in inputs.leaves if leaf.grad is not None]
    want.backward(d_rows[0])
    experts = layer.experts
    for whole in (experts.fc1_weight, experts.fc1_bias, experts.fc2_weight, experts.fc2_bias):
        for grad in whole.grad:
            assert any(g.shape == grad.shape and torch.allclose(g, grad, atol=1e-5) for g in got)


SHAPES = [LayerShape(96, 8, 32, experts=6, top_k=1), LayerShape(64, 16, 24, 4, dtype="bfloat16")]


@pytest.mark.parametrize("shape", SHAPES)
def test_fewest_bytes_are_those_of_inputs_and_outputs(shape):
    """By formula, against the operators' tensors; empty rows and one of two maps are not read."""
    bench_kernels = program("kernels")

    def size(value):
        if isinstance(value, torch.Tensor):
            return value.nbytes
        return sum(map(size, value)) if isinstance(value, list | tuple) else 0

    kernels, full = bench_kernels.make_kernels(shape, torch.device("cpu"), seed=1, sets=1)
    _, ((_, row, pair),) = kernels["dispatch"]
    assert full == (pair >= 0).double().mean().item() and 0.5 < full < 1
    _, ((rows, *_),) = kernels["combine"]
    empty = int((pair < 0).sum()) * shape.model_dim * rows.itemsize
    unread = {"dispatch": size(row), "dispatch bwd": empty, "combine": size(pair) + empty,
              "combine bwd": size(row) + empty}  # fmt: skip
    for name, fewest in bench_kernels.fewest_bytes(shape, full).items():
        run, (inputs,) = kernels[name]
        moved = size(inputs) + size(run(*inputs)) - unread.get(name, 0)
        assert moved == fewest, name


# tokens, experts, top-k, capacity factor, ranks
CASES = [
    (64, 8, 2, 1.0, 0),
    (37, 4, 1, 1.0, 0),  # T is no multiple of E
    (37, 5, 3, 2.0, 0),  # all are kept
    (40, 4, 2, 0.5, 0),  # first and second choices are dropped
    (9, 3, 3, 1.0, 0),
    (48, 8, 2, 1.0, 4),  # simulated: several local experts, rows of all ranks
]


def run(module, layer, x, dy):
    """Output, aux loss and gradients of input and all parameters, by name."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y, aux = module(x, return_aux=True)
    torch.autograd.backward((y, aux.loss), (dy, torch.tensor(0.3, dtype=aux.loss.dtype)))
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"y": y, "loss": aux.loss, "dx": x.grad, **grads}, aux


@pytest.mark.parametrize("tokens, experts, top_k, factor, ranks", CASES)
def test_equals_layer(tokens, experts, top_k, factor, ranks):
    torch.manual_seed(1)
    groups = build_groups(experts, simulate_world_size=ranks)
    options = {"top_k": top_k, "capacity_factor": factor, "groups": groups}
    layer = MoELayer(12, experts, 20, **options).double()
    x, dy = torch.randn(2, tokens, 12, dtype=torch.float64)
    want, want_aux = run(layer, layer, x, dy)
    got, aux = run(DenseMoE(layer), layer, x, dy)
    for name in want:
        assert want[name].abs().max() > 0, name
        assert_close(name, got[name], want[name], torch.float64)
    assert aux.load_E.tolist() == want_aux.load_E.tolist()
    if factor < 1:
        assert (want["y"] == 0).all(dim=1).any(), "no token was dropped: the case tests nothing"


def test_refuses_unknown_options():
    with pytest.raises(ValueError, match="input_jitter=0.1"):
        DenseMoE(MoELayer(8, 4, 8, input_jitter=0.1))


def test_dispatch_by_masks_grows_with_the_square():
    """Operations as torch counts them, without those of the experts, which both have."""

    def operations(layer, tokens):
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(tokens, 16))
        return counter.get_total_flops()

    ours = MoELayer(16, 4, 32, capacity_factor=1.0)
    assert operations(ours, 512) <= 2 * operations(ours, 256)
    extra = [operations(DenseMoE(ours), n) - operations(ours, n) for n in (256, 512)]
    assert extra[1] == 4 * extra[0] > 0
