"""Operators, training, all-to-all and figures: every script at a tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_alltoall
import bench_kernels
import bench_train
import plot
import pytest
import torch
import train_models
from fairseq import tasks
from kernel_cases import make_kernel_cases
from presets import LayerShape

ROOT = Path(__file__).parents[2]
KERNELS = {"topk_gating", "topk_gating bwd", "assign_slots", "assign_rows", "dispatch",
           "dispatch bwd", "combine", "combine bwd", "bias_act gelu", "bias_act gelu bwd",
           "fast_cumsum_sub_one int64", "fast_cumsum_sub_one int32"}  # fmt: skip


def test_kernels(tmp_path):
    path = tmp_path / "kernels.json"
    sizes = ["--tokens", "64", "--model-dim", "16", "--hidden-dim", "32", "--experts", "4"]
    assert bench_kernels.main([
        "--device", "cpu", *sizes, "--repetitions", "3", "--warmup", "1", "--output", str(path),
    ]) == 0  # fmt: skip
    result = json.loads(path.read_text(encoding="utf-8"))
    own = {row["name"] for row in result["results"] if row["backend"] == "torch"}
    assert own == KERNELS
    copy = result["copy"]["bytes_per_second"]
    for row in result["results"]:
        speed = row["bytes"] / (1e-3 * row["ms"]["p50"])
        assert row["share_of_copy"] == pytest.approx(speed / copy, rel=1e-3)
    assert set(result["times_faster_than_torch"]) == {
        "fast_cumsum_sub_one int64 (torch)", "fast_cumsum_sub_one int32 (torch)",
    }  # fmt: skip
    assert result["goals"] == []  # a GPU's
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_kernel_bytes():
    """What must move is counted by hand for the two that have a goal."""
    shape = LayerShape(64, 16, 32, experts=4, dtype="float32")
    cases = {c.name: c for c in make_kernel_cases(shape, torch.device("cpu"), 1, 1)}
    tokens, rows, row, pair = 64 * 16 * 4, 4 * 32 * 16 * 4, 64 * 2 * 4, 4 * 32 * 4
    used = int((cases["combine"].inputs[0][2] >= 0).sum()) * 16 * 4
    assert used < rows
    # every row is written, also the unused ones; only the used ones are read
    assert cases["dispatch"].bytes_moved() == tokens + pair + rows
    assert cases["combine"].bytes_moved() == used + row + 64 * 2 * 4 + tokens
    assert cases["dispatch bwd"].bytes_moved() == used + row + tokens
    weights = 2 * 64 * 2 * 4  # and their gradients
    assert cases["combine bwd"].bytes_moved() == tokens + used + pair + weights + rows
    assert cases["fast_cumsum_sub_one int64"].bytes_moved() == 64 * 4 * (8 + 4)


def test_kernels_refuse_triton_on_a_cpu(capsys):
    assert bench_kernels.main(["--device", "cpu", "--backends", "triton"]) == 2
    assert "need a GPU" in capsys.readouterr().err


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "train.json"
    small = [
        "task.tokens_per_sample=16",
        "task.dict_size=60",
        "model.decoder_layers=2",
        "model.decoder_embed_dim=16",
        "model.decoder_ffn_embed_dim=32",
        "model.moe_expert_count=4",
        "model.dropout=0.0",
        "model.attention_dropout=0.0",
    ]
    overrides = [word for text in small for word in ("--override", text)]
    arguments = ["--device", "cpu", "--updates", "2", "--warmup", "1", *overrides]
    assert bench_train.main([*arguments, "--output", str(path)]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_training(training):
    results = training["results"]
    assert list(results) == ["moe", "dense", "flop-matched"]
    for run in results.values():
        assert len(run["raw_seconds"]) == 2 and len(run["losses"]) == 3
        assert run["tokens_per_second"]["p50"] == pytest.approx(
            64 / run["seconds"]["p50"], rel=1e-3
        )
    assert training["ratios"]["moe/dense"] == pytest.approx(
        results["moe"]["tokens_per_second"]["p50"] / results["dense"]["tokens_per_second"]["p50"],
        rel=1e-3,
    )
    assert training["goals"] == []  # they hold for the preset, not for overrides


def test_dense_formulation_trains_like_the_plugin(training):
    """Same seeds, same batches: the losses agree, so both are the same model."""
    moe, dense = (training["results"][name]["losses"] for name in ("moe", "dense"))
    assert moe == pytest.approx(dense, abs=2e-3)  # fairseq logs three digits
    assert moe != pytest.approx(training["results"]["flop-matched"]["losses"], abs=2e-3)


def test_flop_matched_model_does_the_same_work(training):
    """But for the gates, which it has not."""
    flops = {n: run["model_flops_per_token"] for n, run in training["results"].items()}
    assert flops["moe"] == flops["dense"]
    gate = 3 * 2 * 16 * 4
    assert flops["flop-matched"] == pytest.approx(flops["moe"] - gate)


def test_training_leaves_out_what_does_not_fit(training, tmp_path, monkeypatch):
    assert training["not_run"] == {} and training["settings"]["interleaved"]
    monkeypatch.setattr(bench_train, "available_memory", lambda device: 1000)
    path = tmp_path / "train.json"
    arguments = ["--device", "cpu", "--updates", "1", "--warmup", "0", "--one-by-one"]
    for override in training["settings"]["overrides"][-8:]:
        arguments += ["--override", override]
    assert bench_train.main([*arguments, "--output", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert list(result["results"]) == ["moe", "flop-matched"]
    assert "0.0 GB are available" in result["not_run"]["dense"]
    assert not result["settings"]["interleaved"]


def test_training_keeps_what_it_measured_before_memory_ran_out(training, tmp_path, monkeypatch):
    path, update, done = tmp_path / "train.json", bench_train.Run.update, []

    def limited(run, sample):
        if run.variant == "dense" and len(done) >= 5:
            raise torch.cuda.OutOfMemoryError("as CUDA says it")
        if run.variant == "flop-matched":
            raise KeyboardInterrupt
        done.append(run.variant)
        return update(run, sample)

    monkeypatch.setattr(bench_train.Run, "update", limited)
    arguments = ["--device", "cpu", "--tiny", "--one-by-one", "--output", str(path)]
    with pytest.raises(KeyboardInterrupt):
        bench_train.main(arguments)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert done == ["moe"] * 3 + ["dense"] * 2 and result["complete"] is False
    lengths = {name: len(run["raw_seconds"]) for name, run in result["results"].items()}
    assert lengths == {"moe": 2, "dense": 1}
    monkeypatch.setattr(bench_train.Run, "update", update)
    done[:] = [None] * 5
    monkeypatch.setattr(bench_train.Run, "update", lambda run, sample: limited(run, sample)
                        if run.variant == "dense" else update(run, sample))  # fmt: skip
    assert bench_train.main(arguments) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert list(result["results"]) == ["moe", "flop-matched"] and "complete" not in result
    assert result["not_run"] == {"dense": "it ran out of memory on this GPU"}


def test_a_simulated_rank_is_built_where_it_is_trained():
    """Nothing in a model's construction mixes its device with the default one."""
    preset = bench_train.PRESETS["meta-1.1t-rank"]
    config = bench_train.load_config(
        preset, bench_train.tiny_overrides(preset), bench_train.Ranks(torch.device("cpu"))
    )
    task = tasks.setup_task(config.task)
    for settings in (config, train_models.flop_matched(config)):
        with torch.device("meta"):
            model = task.build_model(settings.model)
        assert all(param.is_meta for param in model.parameters())


def test_errors_of_bench_train(capsys):
    assert bench_train.main(["--device", "cpu", "--variants", "moe,tutel"]) == 2
    assert "tutel" in capsys.readouterr().err


def test_alltoall(tmp_path):
    path = tmp_path / "alltoall.json"
    command = [sys.executable, "-m", "fairseq_tutel.launch", "--nproc-per-node", "2",
               "--bind", "none", "--", sys.executable, "scripts/bench/bench_alltoall.py",
               "--device", "cpu", "--min-bytes", "1K", "--max-bytes", "16K", "--iterations", "2",
               "--repetitions", "2", "--output", str(path)]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["world_size"], result["backend"]) == (2, "gloo")
    rows = [(row["algorithm"], row["bytes"]) for row in result["results"]]
    assert rows == [(name, size) for size in (1024, 4096, 16384)
                    for name in bench_alltoall.algorithms()]  # fmt: skip
    for row in result["results"]:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"]["p50"], rel=1e-3)
        assert row["busbw"] == pytest.approx(row["algbw"] / 2, rel=1e-3)


def test_alltoall_needs_ranks(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert bench_alltoall.main(["--device", "cpu"]) == 2
    assert "at least 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, size", [("4096", 4096), ("64K", 65536), ("256m", 256 << 20), ("1G", 1 << 30)]
)
def test_sizes(text, size):
    assert bench_alltoall.parse_size(text) == size


def test_figures(tmp_path, training):
    layer = {
        "benchmark": "layer", "preset": "cpu", "world_size": 1, "commit": "0" * 40,
        "date": "2026-01-01T00:00:00", "settings": {"simulated_ranks": 16},
        "hardware": {"cpu": "some CPU", "threads": 2},
        "results": {name: {"ms": {"both": {"p50": value}}}
                    for name, value in (("dense", 30.0), ("torch", 4.0))},
    }  # fmt: skip
    paths = [tmp_path / "layer.json", tmp_path / "train.json"]
    for path, result in zip(paths, (layer, training), strict=True):
        path.write_text(json.dumps(result), encoding="utf-8")
    assert plot.main([*map(str, paths), "--out", str(tmp_path / "figures")]) == 0
    for name in ("single_layer.png", "alltoall.png", "end_to_end.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 10_000
    (bar,) = plot.layer_speedups([layer])
    assert bar["speedup"] == 7.5 and bar["ranks"] == 16 and "SIMULATED" in bar["label"]


def test_end_to_end_bars_are_of_one_rank(training):
    on_8 = {**training, "world_size": 8}
    (one,), (of_8,) = plot.training_bars([training]), plot.training_bars([on_8])
    assert of_8["speeds"]["moe"] == pytest.approx(one["speeds"]["moe"] / 8)


def test_figures_refuse_other_files(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text("[]", encoding="utf-8")
    assert plot.main([str(path), "--out", str(tmp_path)]) == 2
    assert "other.json" in capsys.readouterr().err
