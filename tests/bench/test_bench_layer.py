"""The layer benchmark at tiny sizes: results, ratios, goals, refusals."""

import json

import bench_layer
import layer_cases
import pytest
import torch
from layer_cases import LayerInputs
from presets import LayerShape

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import ExpertRows

TINY = ["--device", "cpu", "--tokens", "48", "--model-dim", "16", "--hidden-dim", "24",
        "--experts", "4", "--repetitions", "3", "--warmup", "1"]  # fmt: skip


def bench(tmp_path, *arguments):
    path = tmp_path / "layer.json"
    assert bench_layer.main([*TINY, "--output", str(path), *arguments]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_result(tmp_path, capsys):
    result = bench(tmp_path)
    assert list(result["results"]) == ["dense", "torch", "experts", "products"]
    for case in result["results"].values():
        for phase in ("forward", "backward", "both"):
            spread = case["ms"][phase]
            assert 0 < spread["min"] <= spread["p20"] <= spread["p50"] <= spread["p80"]
            assert len(case["raw_ms"][phase]) == 3
    assert result["results"]["dense"]["rms_error_ratio"] < 1e-5
    median = {name: case["ms"]["both"]["p50"] for name, case in result["results"].items()}
    ratios = result["ratios"]["torch"]
    assert ratios["dense/this both"] == pytest.approx(median["dense"] / median["torch"], rel=1e-3)
    for floor in ("experts", "products"):
        want = median["torch"] / median[floor]
        assert ratios[f"this/{floor} both"] == pytest.approx(want, rel=1e-3)
    assert result["settings"]["capacity"] == 24
    for key in ("date", "command", "hardware", "versions", "commit", "memory_method"):
        assert key in result
    printed = capsys.readouterr().out
    assert "products" in printed and "times faster than dense" in printed


@pytest.fixture
def inputs():
    shape = LayerShape(48, 16, 24, experts=4)
    return LayerInputs(shape, build_groups(4), torch.device("cpu"), 1)


def test_experts_alone_are_the_layers(inputs):
    """The baseline's loop returns what the layer's engine returns, outputs and gradients."""
    case = layer_cases.make_case("experts", inputs, "torch")
    case.begin()
    outputs, grads = case.forward(0)
    torch.autograd.backward(outputs, grads)
    want = inputs.layer.experts(ExpertRows(inputs.rows[0]))
    want.backward(inputs.d_rows[0])
    torch.testing.assert_close(torch.stack(outputs), want)
    got = [leaf.grad for leaf in case.leaves() if leaf.grad is not None]
    experts = inputs.layer.experts
    for whole in (experts.fc1_weight, experts.fc1_bias, experts.fc2_weight, experts.fc2_bias):
        for grad in whole.grad:
            assert any(g.shape == grad.shape and torch.allclose(g, grad, atol=1e-5) for g in got)


def test_simulated_rank_and_chosen_cases(tmp_path, capsys):
    result = bench(tmp_path, "--simulate-ranks", "2", "--backends", "torch,dense,triton")
    assert list(result["results"]) == ["dense", "torch"]
    assert "need a GPU" in result["not_run"]["triton"]
    assert result["settings"]["local_experts"] == 2
    assert result["results"]["dense"]["rms_error_ratio"] < 1e-5
    assert "SIMULATED rank of 2" in capsys.readouterr().out


def test_dense_form_is_left_out_where_it_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_cases, "available_memory", lambda device: 1000)
    result = bench(tmp_path)
    assert "dense" not in result["results"]
    # 3 masks of 48 * 4 * 24 numbers of 4 bytes
    assert result["not_run"]["dense"].startswith("its masks alone need 0.0 GB (computed)")
    assert result["goals"] == []


def test_a_wrong_result_stops_the_benchmark(tmp_path, monkeypatch):
    """No time of something that does not compute the layer."""
    right = layer_cases.DenseMoE.forward

    def wrong(self, x, **kwargs):
        y, aux = right(self, x, **kwargs)
        return y * 1.01, aux

    monkeypatch.setattr(layer_cases.DenseMoE, "forward", wrong)
    with pytest.raises(RuntimeError, match="dense does not compute what torch does"):
        bench(tmp_path)


def test_a_run_that_is_stopped_keeps_its_repetitions(tmp_path, monkeypatch):
    def stopped(*args, progress, **kwargs):
        calls = []

        def count(times):
            progress(times)
            calls.append(times)
            if len(calls) == 2:
                raise KeyboardInterrupt

        return time_cases(*args, progress=count, **kwargs)

    time_cases = bench_layer.time_cases
    monkeypatch.setattr(bench_layer, "time_cases", stopped)
    monkeypatch.setattr(bench_layer.Report, "seconds_between", 0)
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path)
    result = json.loads((tmp_path / "layer.json").read_text(encoding="utf-8"))
    assert result["complete"] is False
    for case in result["results"].values():
        assert len(case["raw_ms"]["both"]) == 2 and case["ms"]["both"]["p50"] > 0
