"""Benchmarks of evaluation and generation at tiny sizes, and what they expect by a formula."""

import json

import bench_decode
import bench_generate
import bench_layer
import pytest
import torch
from eval_cases import META_FRACTION, dense_at_fraction, expected_ratio, make_layer
from presets import LayerShape
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("tokens, experts", [(64, 8), (32, 4), (96, 16)])
def test_the_formula_counts_operations(tokens, experts):
    """Against what torch counts of the masks' products in the dense formulation."""
    shape = LayerShape(tokens, 64, 48, experts)
    run, rows = dense_at_fraction(make_layer(shape), META_FRACTION), experts * tokens // 4
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(torch.randn(tokens, 64))
    making_masks = 2 * tokens * rows * shape.top_k
    moved = counter.get_total_flops() - making_masks
    # torch does not count the operators of this package: the gate's product and the experts
    computed = 2 * rows * 2 * 64 * 48
    ours = 2 * shape.top_k * tokens * 2 * 64 * 48
    assert (moved + computed) / ours == pytest.approx(expected_ratio("dense", shape), rel=1e-6)
    assert expected_ratio("meta", shape) == expected_ratio("dense", shape)
    whole = LayerShape(4096, 256, 1024, 8)
    assert expected_ratio("meta-training", whole) == pytest.approx(1 + 4096 / 1024)


def test_layer_in_evaluation(tmp_path, capsys):
    path = tmp_path / "layer.json"
    words = ["--device", "cpu", "--mode", "eval", "--eval-tokens", "2,80", "--repetitions", "2"]
    words += ["--model-dim", "16", "--hidden-dim", "24", "--experts", "4", "--warmup", "1"]
    assert bench_layer.main([*words, "--output", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert list(result["results"]) == ["2", "80"]
    for row in result["results"].values():
        assert set(row["not_run"]) == {"meta", "meta-training", "tutel"}
        assert {"layer", "bf16", "dense", "flop-matched"} <= set(row["ms"])
        ratio = [
            a / b for a, b in zip(*(row["raw_ms"][n] for n in ("dense", "layer")), strict=True)
        ]
        assert row["over_layer"]["dense"]["median"] == pytest.approx(sum(ratio) / 2, rel=1e-2)
    assert "by formula" in capsys.readouterr().out


def test_generation(tmp_path):
    path = tmp_path / "generate.json"
    words = """--layers 2 --model-dim 16 --hidden-dim 24 --experts 4 --vocabulary 60 --steps 3
        --repetitions 2 --grid 1x1,2x2 --cases dense,int8,flop-matched,meta"""
    assert bench_generate.main([*words.split(), "--output", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert list(result) == ["1x1", "2x2"]
    for row in result.values():
        assert set(row["ms_per_step"]) == {"layer", "dense", "int8", "flop-matched"}
        assert set(row["not_run"]) == {"meta"}
        size = row["parameter_bytes"]
        assert size["int8"] < size["layer"] and size["flop-matched"] < size["layer"]
    assert bench_generate.main(["--grid", "8"]) == 2


def test_steps_of_a_layer(tmp_path):
    path = tmp_path / "decode.json"
    assert bench_decode.main(["--device", "cpu", "--tiny", "--output", str(path)]) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert [row["tokens"] for row in rows] == [1, 8]
    for row in rows:
        assert row["roofline_ms"] > 0 and row["ms"]["eager"]["p50"] > 0
        assert row["not_run"] == {"captured": "CUDA graphs need a GPU"}
