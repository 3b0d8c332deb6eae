"""Baselines and formulas of the benchmarks, each against a count or a loop of its own."""

import pytest
import torch
from helpers.benchmarks import program
from layers import PRESETS, Inputs, LayerShape, experts_alone, make_layer

from fairseq_tutel.moe import ExpertRows


def test_predictions(monkeypatch):
    """Products and bytes by hand; the review's estimate for meta-1.1t on an H200."""
    import predict

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names.pop())
    names = ["NVIDIA H200", "NVIDIA A100-SXM4-40GB", "NVIDIA B200", "AMD Instinct MI300X", "RTX"]
    found = [predict.rates_of(torch.device("cuda", 0)) for _ in list(names)]
    assert found[0] is None and all(found[1:])
    assert predict.rates_of(torch.device("cpu")) is None and predict.beside(2.0, None) == {}
    h200 = found[-1]
    assert h200.half_flops == pytest.approx(0.78 * 989e12)
    assert h200.stream == pytest.approx(0.8 * 4.8e12)
    ms = predict.layer_ms(PRESETS["meta-1.1t"].shape, h200)
    rows = 49152  # 512 ranks x 96 slots
    assert ms["products"] == pytest.approx(1e3 * 12 * rows * 4096 * 16384 / (0.78 * 989e12))
    assert 1.08 < ms["triton"] / ms["products"] < 1.13
    assert ms["products"] < ms["experts"] < ms["triton"] < ms["dense"]
    assert predict.beside(3.0, 2.0) == {"predicted ms": 2.0, "measured/predicted": 1.5}


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


def test_operations_of_swins_masks():
    """Against a count by hand: two products of each mask in inference, five in training."""
    bench_swin = program("swin")
    preset = bench_swin.Preset("for a test", "tiny", 4, (2,))
    config, models = bench_swin.build_models(preset, torch.device("cpu"), tiny=True, seed=1)
    layers = bench_swin.sparse_layers(config, 4)
    masks = sum(2 * s.tokens * s.experts * s.capacity * s.model_dim for s in layers)
    experts = sum(4 * s.experts * s.capacity * s.model_dim * s.hidden_dim for s in layers)
    for mode, products, passes in (("inference", 2, 1), ("training", 5, 3)):
        names = (bench_swin.OURS, bench_swin.MASKS)
        how = (config, 4, mode, "float32")
        pair = [bench_swin.make_case(name, models[name], *how) for name in names]
        ratio = bench_swin.counted_ratio(*pair, layers, mode)
        # ratio = own / (own + products of the masks); outer products add 1 / C of one to each
        own = products * masks * ratio / (1 - ratio)
        assert own > passes * experts
        dense = bench_swin.counted_ratio(pair[0], pair[0], layers, mode)
        assert dense == 1 and ratio < 1
