"""Operators, training and all-to-all: every script at a tiny size."""

import json
import sys

import bench_adaptive
import bench_alltoall
import bench_exchange
import bench_kernels
import bench_layer
import bench_train
import pytest
import torch
from helpers import commands
from presets import LayerShape

KERNELS = {"topk_gating", "topk_gating bwd", "assign_slots", "assign_rows", "dispatch",
           "dispatch bwd", "combine", "combine bwd", "bias_act gelu",
           "bias_act gelu bwd"}  # fmt: skip


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
    assert set(result["times_faster_than_torch"]) == {"assign_slots (torch)"}
    assert result["goals"] == []  # a GPU's


def test_kernel_bytes():
    """What must move is counted by hand for the two that have a goal."""
    shape = LayerShape(64, 16, 32, experts=4, dtype="float32")
    cases = {c.name: c for c in bench_kernels.make_kernel_cases(shape, torch.device("cpu"), 1, 1)}
    tokens, rows, row, pair = 64 * 16 * 4, 4 * 32 * 16 * 4, 64 * 2 * 4, 4 * 32 * 4
    used = int((cases["combine"].inputs[0][2] >= 0).sum()) * 16 * 4
    assert used < rows
    # every row is written, also the unused ones; only the used ones are read
    assert cases["dispatch"].bytes_moved() == tokens + pair + rows
    assert cases["combine"].bytes_moved() == used + row + 64 * 2 * 4 + tokens
    assert cases["dispatch bwd"].bytes_moved() == used + row + tokens
    weights = 2 * 64 * 2 * 4  # and their gradients
    assert cases["combine bwd"].bytes_moved() == tokens + used + pair + weights + rows


def launch(kind, *arguments):
    """Run a benchmark on two ranks of this CPU."""
    launcher = ["-m", "fairseq_tutel.launch", "--nproc-per-node", "2", "--bind", "none", "--"]
    program = [sys.executable, f"scripts/bench/bench_{kind}.py", "--device", "cpu", *arguments]
    commands.run([sys.executable, *launcher, *program], timeout=120)


def train(path, *arguments):
    """The result of a tiny run."""
    command = ["--device", "cpu", "--tiny", "--output", str(path), *arguments]
    assert bench_train.main(command) == 0
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return train(tmp_path_factory.mktemp("train") / "train.json")


def test_training(training):
    results = training["results"]
    assert list(results) == ["moe", "dense", "flop-matched"]
    for run in results.values():
        assert len(run["raw_seconds"]) == 2 and len(run["losses"]) == 3
        speed = 32 / run["seconds"]["p50"]
        assert run["tokens_per_second"]["p50"] == pytest.approx(speed, rel=1e-3)
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


def test_training_leaves_out_what_does_not_fit(training, tmp_path, monkeypatch):
    assert training["not_run"] == {} and training["settings"]["interleaved"]
    monkeypatch.setattr(bench_train, "available_memory", lambda device: 1000)
    result = train(tmp_path / "train.json", "--one-by-one")
    assert list(result["results"]) == ["moe", "flop-matched"]
    assert "0.0 GB are available" in result["not_run"]["dense"]
    assert not result["settings"]["interleaved"]


@pytest.mark.long
def test_training_on_two_ranks(tmp_path):
    """A preset of one simulated rank becomes one of real ranks, also as a rehearsal."""
    path = tmp_path / "train.json"
    launch("train", "--preset", "meta-8gpu-rank", "--tiny", "--one-by-one", "--output", str(path))
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["world_size"], result["settings"]["experts"]) == (2, 4)
    assert result["settings"]["simulated_ranks"] == 0
    assert sorted(result["results"]) == ["dense", "moe"]


def test_alltoall(tmp_path):
    path = tmp_path / "alltoall.json"
    sizes = ["--sizes", "1K,4K,16K", "--iterations", "2", "--repetitions", "2"]
    launch("alltoall", *sizes, "--output", str(path))
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["world_size"], result["backend"]) == (2, "gloo")
    rows = [(row["algorithm"], row["bytes"]) for row in result["results"]]
    assert rows == [(name, size) for size in (1024, 4096, 16384)
                    for name in bench_alltoall.algorithms()]  # fmt: skip
    for row in result["results"]:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"]["p50"], rel=1e-3)
        assert row["busbw"] == pytest.approx(row["algbw"] / 2, rel=1e-3)


@pytest.mark.parametrize(
    "benchmark, arguments, message",
    [
        (bench_layer, ["--device", "cpu", "--backends", "cuda"], "--backends cuda"),
        (bench_layer, ["--device", "cpu", "--tokens", "0"], "--tokens 0"),
        (bench_layer, ["--device", "cpu", "--experts", "6", "--simulate-ranks", "4"], "6 experts"),
        (bench_layer, ["--device", "cpu", "--experts", "4", "--top-k", "5"], "top_k=5"),
        (bench_kernels, ["--device", "cpu", "--backends", "triton"], "need a GPU"),
        (bench_train, ["--device", "cpu", "--variants", "moe,tutel"], "tutel"),
        (bench_alltoall, ["--device", "cpu"], "at least 2 ranks"),
        (bench_exchange, ["wire"], "at least 2 ranks"),
        (bench_adaptive, [], "at least 2 ranks"),
    ],
)
def test_refusals(capsys, monkeypatch, benchmark, arguments, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert benchmark.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_sharded_statistics(tmp_path):
    launch("zero", "--tiny", "--output", str(tmp_path / "zero.json"))
    result = json.loads((tmp_path / "zero.json").read_text(encoding="utf-8"))
    replicated, sharded = (result["results"][n]["bytes"] for n in ("replicated", "sharded"))
    assert result["same_losses"] and replicated["experts"] == sharded["experts"]
    (whole, other), parts = replicated["dense"], sharded["dense"]
    assert whole == other == sum(parts) and max(parts) < 0.6 * whole
