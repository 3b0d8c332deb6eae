"""The layer benchmark at tiny sizes: results, ratios, goals, refusals."""

import json

import bench_layer
import layer_cases
import pytest
import torch
from layer_cases import LayerInputs
from presets import PRESETS, Goal, LayerShape

from fairseq_tutel.distributed import build_groups

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
    assert ratios["this/products both"] == pytest.approx(
        median["torch"] / median["products"], rel=1e-3
    )
    assert result["settings"]["capacity"] == 24
    for key in ("date", "command", "hardware", "versions", "commit", "memory_method"):
        assert key in result
    assert (tmp_path / "layer.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "products" in printed and "times faster than dense" in printed


def test_the_floor_pays_for_no_copy_of_a_weights_gradient():
    """Its products are those of the layer: gradients as autograd's, in the weights' own layout."""
    groups = build_groups(4)
    inputs = LayerInputs(LayerShape(48, 16, 24, experts=4), groups, torch.device("cpu"), 1)
    case = layer_cases.make_case("products", inputs, "torch")
    (out,), (d_out,) = case.forward(0)
    weights = inputs.layer.experts.fc1_weight, inputs.layer.experts.fc2_weight
    got = torch.autograd.grad(out, (inputs.rows[0], *weights), d_out)
    again = inputs.rows[0] @ weights[0].transpose(1, 2) @ weights[1].transpose(1, 2)
    want = torch.autograd.grad(again, (inputs.rows[0], *weights), d_out)
    for a, b, of in zip(got, want, (inputs.rows[0], *weights), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == of.stride()


def test_simulated_rank_and_chosen_cases(tmp_path, capsys):
    result = bench(tmp_path, "--simulate-ranks", "2", "--backends", "torch,dense-loop")
    assert list(result["results"]) == ["dense-loop", "torch"]
    assert result["settings"]["local_experts"] == 2
    assert result["results"]["dense-loop"]["rms_error_ratio"] < 1e-5
    assert "SIMULATED rank of 2" in capsys.readouterr().out


def test_triton_is_not_timed_in_the_interpreter(tmp_path):
    result = bench(tmp_path, "--backends", "torch,triton")
    assert list(result["results"]) == ["torch"]
    assert "need a GPU" in result["not_run"]["triton"]


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backends", "cuda"], "--backends cuda"),
        (["--tokens", "0"], "--tokens 0"),
        (["--experts", "6", "--simulate-ranks", "4"], "6 experts"),
        (["--top-k", "5"], "top_k=5"),
    ],
)
def test_errors(tmp_path, capsys, arguments, message):
    output = ["--output", str(tmp_path / "x.json")]
    assert bench_layer.main([*TINY, *output, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_is_stopped_keeps_its_repetitions(tmp_path, monkeypatch):
    from record import Journal

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
    monkeypatch.setattr(bench_layer, "Journal", lambda path: Journal(path, seconds=0))
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path)
    result = json.loads((tmp_path / "layer.json").read_text(encoding="utf-8"))
    assert result["complete"] is False
    for case in result["results"].values():
        assert len(case["raw_ms"]["both"]) == 2 and case["ms"]["both"]["p50"] > 0


def test_several_presets_and_one_that_fails(tmp_path, monkeypatch, capsys):
    def inputs(shape, *args, _make=bench_layer.LayerInputs):
        if shape.simulated_ranks:
            raise RuntimeError("no such layer")
        return _make(shape, *args)

    arguments = ["--device", "cpu", "--tiny", "--preset", "fig14,cpu"]
    assert bench_layer.main([*arguments, "--output", str(tmp_path / "one.json")]) == 2
    assert "several presets need {preset}" in capsys.readouterr().err
    monkeypatch.setattr(bench_layer, "LayerInputs", inputs)
    assert bench_layer.main([*arguments, "--output", str(tmp_path / "{preset}.json")]) == 1
    assert "no such layer" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.json")] == ["tiny-cpu.json"]


def test_cases_that_run_out_of_memory_are_left_out(monkeypatch):
    class Named:
        def __init__(self, name):
            self.name = name

    monkeypatch.setattr(bench_layer, "fits", lambda case, device: case.name != "dense")
    cases, skipped = [Named("dense"), Named("triton")], {}
    ranks = bench_layer.Ranks(bench_layer.torch.device("cuda"))
    assert bench_layer.leave_out_large(cases, ranks, skipped) == cases[1:]
    assert skipped == {"dense": "it ran out of memory on this GPU"}


def test_goals_are_judged_by_the_median():
    results = {
        name: {"ms": {"both": {"p50": value}}}
        for name, value in (("dense", 50.0), ("triton", 10.0), ("products", 9.2))
    }
    faster = Goal("faster", "dense", "layer", 5.5)
    close = Goal("close", "layer", "products", 1.1, at_most=True)
    cpu = Goal("elsewhere", "dense", "layer", 5.0, device="cpu")
    got = bench_layer.check_goals([faster, close, cpu], results, "cuda")
    assert [(g["goal"], g["reached"]) for g in got] == [("faster", False), ("close", True)]
    assert got[0]["ratio"] == 5.0


def test_presets_are_the_published_shapes():
    meta = PRESETS["meta-1.1t"].shape
    assert meta.capacity == 96 and meta.rows(1) == 512 * 96 and meta.local_experts(1) == 1
    eight = PRESETS["meta-8gpu"].shape
    assert eight.capacity == 6144 and eight.rows(1) == 8 * 6144
    paper = PRESETS["fig14"].shape
    assert (paper.tokens, paper.model_dim, paper.local_experts(1)) == (16384, 2048, 2)
    # equation 1 of arXiv 2206.03382: k * f * T / E
    assert paper.capacity == 2 * 16384 // 32
    assert PRESETS["blog-8gpu"].shape.on_ranks(8) == LayerShape(
        16384, 2048, 2048, experts=16, dtype="bfloat16"
    )
