"""predict.py: bytes by formula are those of the operators' tensors; times add up."""

import json

import bench_kernels
import predict
import pytest
import torch
from presets import LayerShape

from fairseq_tutel import ops

SHAPES = [LayerShape(96, 8, 32, experts=6, top_k=1), LayerShape(64, 16, 24, 4, dtype="bfloat16")]


@pytest.mark.parametrize("shape", SHAPES)
def test_fewest_bytes_are_those_of_inputs_and_outputs(shape):
    ops.set_backend("torch")
    cases = bench_kernels.make_kernel_cases(shape, torch.device("cpu"), seed=1, sets=1)
    (*_, pair) = next(case for case in cases if case.name == "dispatch").inputs[0]
    full = (pair >= 0).double().mean().item()
    assert 0.5 < full < 1
    moved = predict.bytes_moved(shape, full)
    for case in cases:
        if case.own:
            assert moved[case.name].fewest == case.bytes_moved(), case.name


def test_the_layer_is_the_sum_of_its_parts(tmp_path, capsys):
    path = tmp_path / "predicted.json"
    arguments = ["--preset", "fig14", "--hardware", "h100", "--output", str(path)]
    assert predict.main(arguments) == 0 and "h100 ms" in capsys.readouterr().out
    found = json.loads(path.read_text())["results"]["fig14"]["predicted"]["h100"]
    parts = sum(found["operators_ms"].values()) + found["products_ms"] + found["gate_ms"]
    assert parts < found["layer_ms"] < 1.1 * parts
    # 989 TFLOP/s * 0.55; two products, each with as many rows in its two gradients
    assert found["products_ms"] == pytest.approx(
        1e3 * 3 * 4 * 32768 * 2048 * 2048 / (0.55 * 989e12), rel=1e-4
    )
    assert predict.main(["--hardware", "h1000"]) == 2
