"""Every benchmark at a tiny size on one rank: the record holds what the page of results quotes."""

import importlib

import pytest
from helpers.benchmarks import PROGRAMS, program, ratio, rehearse

pytestmark = pytest.mark.long

SMALL = "--device cpu --tokens 48 --model-dim 16 --hidden-dim 24 --experts 4 --repetitions 3"


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_says_what_a_good_result_is(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main(["--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and "Good" in printed and f"{name}.py" in printed


def test_layer(tmp_path, capsys):
    result = rehearse("layer", tmp_path, SMALL)
    found = result["results"]["custom"]
    assert list(found["ms"]) == ["torch", "dense", "experts", "products"]
    assert found["rms_error_ratio"]["dense"] < 1e-5
    assert found["settings"]["capacity"] == 24 and found["settings"]["local_experts"] == 4
    assert result["goals"] == []  # they are of the presets
    assert "this/that" in capsys.readouterr().out


def test_layer_as_a_simulated_rank(tmp_path):
    words = f"{SMALL} --simulated-ranks 2 --backends torch,dense,triton"
    found = rehearse("layer", tmp_path, words)["results"]["custom"]
    assert list(found["ms"]) == ["torch", "dense"] and "need a GPU" in found["not_run"]["triton"]
    assert found["settings"]["local_experts"] == 2 and found["rms_error_ratio"]["dense"] < 1e-5
    assert "SIMULATED rank of 2" in found["shape"]


def test_layer_without_room_or_capacity(tmp_path, monkeypatch):
    monkeypatch.setattr("layers.available_memory", lambda device: 1000)
    found = rehearse("layer", tmp_path, SMALL)["results"]["custom"]
    # 3 masks of 48 * 4 * 24 numbers of 4 bytes
    assert found["not_run"]["dense"].startswith("masks alone need 0.0 GB (computed)")
    found = rehearse("layer", tmp_path, "--device cpu --tiny --preset dropless-16")["results"]
    found = found["tiny-dropless-16"]
    assert "needs a capacity" in found["not_run"]["dense"] and "products" in found["this_over"]


def test_goals_of_a_preset(tmp_path, monkeypatch):
    """They hold on the preset's own device; a shape of another name has none."""
    bench_layer, layers = program("layer"), importlib.import_module("layers")
    shape = layers.LayerShape(48, 16, 24, 4)
    goals = {"dense": 1e-9, "experts": 1e9}
    for name, want in (("cpu-small", [(1e-9, False), (1e9, True)]), ("a-gpu", [])):
        monkeypatch.setitem(bench_layer.PRESETS, name, layers.Preset("", shape, goals))
        words = f"--device cpu --repetitions 2 --preset {name}"
        found = rehearse("layer", tmp_path, words)["goals"]
        assert [(each["bound"], each["reached"]) for each in found] == want


def test_layer_in_evaluation(tmp_path):
    results = rehearse("layer", tmp_path, f"--mode eval --eval-tokens 2,80 {SMALL}")["results"]
    assert list(results) == ["2 tokens", "80 tokens"]
    for found in results.values():
        assert set(found["not_run"]) == {"meta", "tutel"}
        assert {"int8", "dense", "flop-matched"} <= set(found["this_over"])


def test_steps_of_generation_by_a_layer(tmp_path):
    results = rehearse("layer", tmp_path, "--device cpu --tiny --mode decode")["results"]
    assert [row["tokens"] for row in results.values()] == [1, 8]
    for found in results.values():
        assert found["derived"]["eager"]["over reading of weights"] > 0
        assert found["ms"]["eager"]["wall"]["p50"] > 0
        assert found["not_run"] == {"captured": "CUDA graphs need a GPU"}


def test_memory_of_a_layer(tmp_path):
    result = rehearse("memory", tmp_path, "--device cpu --tiny")
    for network, share in (("ffn", 0.5), ("swiglu", 0.6)):
        rows = result["results"][network]["derived"]
        kept = {name: row["kept over fast"] for name, row in rows.items()}
        assert kept["lean"] < share and kept["minimal"] < 0.1 and kept["checkpoint"] == 0
        assert kept["lean fp8"] < kept["lean"]
    assert len(result["goals"]) == 8


def test_kernels(tmp_path):
    found = rehearse("kernels", tmp_path, "--device cpu --tiny")["results"]["tiny-cpu"]
    copy = found["ms"]["copy"]["forward"]["p50"] / (2 * (256 << 20))
    for name, derived in found["derived"].items():
        share = derived["bytes"] * copy / found["ms"][name]["forward"]["p50"]
        assert derived["share of copy"] == pytest.approx(share, rel=1e-3)
    assert found["derived"]["assign_slots (torch)"]["times faster than torch"] > 0


@pytest.mark.interpreted
def test_products(tmp_path):
    """Every candidate, with rows that are written and gathered, in the interpreter."""
    words = "--device cpu --tiny --preset fine-128"
    results = rehearse("products", tmp_path, words, phase="forward")["results"]
    of_tile = "16x16x16, 1 stages"
    ways = ["grouped_mm", "every GPU", of_tile]
    gathered = [f"gathered {way}" for way in ways]
    for what, want in (
        ("fc1", [*ways, *gathered]),
        ("fc2", ways),
        ("gradient of fc1", ["grouped_mm", of_tile, "gathered grouped_mm", f"gathered {of_tile}"]),
    ):
        found = results[f"tiny-fine-128: {what}"]
        assert list(found["ms"]) == want and not found["not_run"]
        ms = {case: of["forward"]["p50"] for case, of in found["ms"].items()}
        over = found["derived"][want[-1]]["over grouped_mm"]
        torchs = "gathered grouped_mm" if want[-1].startswith("gathered") else "grouped_mm"
        assert over == pytest.approx(ms[want[-1]] / ms[torchs], rel=1e-2)


# what bench_peers uses of Tutel's interface
_TUTEL = """
import torch
class Layer(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        y.l_aux = y.sum()
        return y
def moe_layer(gate_type, experts, model_dim):
    assert gate_type["capacity_factor"] in (0.0, 1.0) and experts["hidden_size_per_expert"] == 48
    return Layer(model_dim, model_dim)
"""


def test_peers(tmp_path):
    """Each of two processes measures as one does alone."""
    (tmp_path / "tutel").mkdir()
    (tmp_path / "tutel" / "__init__.py").touch()
    (tmp_path / "tutel" / "moe.py").write_text(_TUTEL, encoding="utf-8")
    shapes = "base", "top8", "gpu-few"
    words = f"--device cpu --tiny --shapes {','.join(shapes)} --processes 2 --tutel {tmp_path}"
    result = rehearse("peers", tmp_path, words)
    peers = ("experts", "tutel", "tutel dropless")
    assert set(result["results"]) == {f"{s}: {p}" for s in shapes for p in peers}
    assert result["results"]["gpu-few: tutel"]["shape"]["dtype"] == "bfloat16"
    found = result["results"]["top8: tutel"]
    missing = ("meta", "meta+tutel", "mixtral")
    left_out = result["results"]["top8: experts"]["not_run"]
    assert left_out == dict.fromkeys(missing, "no folder was given") and not found["not_run"]
    assert "tutel" in result["peers"] and set(found["ms"]) == {"padded", "tutel"}
    low, middle, high = found["this_over"]["tutel"]
    assert found["derived"]["tutel"]["not slower"] is (high < 1.02)
    # the range of the medians
    medians = [ratio(of["padded"]["both"], of["tutel"]["both"]) for of in found["raw_ms"]]
    wanted = [min(medians), sum(medians) / 2, max(medians)]
    assert len(medians) == 2 and [low, middle, high] == pytest.approx(wanted, rel=1e-3)


def test_training(tmp_path):
    result = rehearse("train", tmp_path, "--device cpu --tiny")
    found = result["results"]["moe+dense+flop-matched"]
    speeds = {name: derived["tokens/s"] for name, derived in found["derived"].items()}
    for name, speed in speeds.items():
        want = 1e3 * 32 / found["ms"][name]["forward"]["p50"]
        assert speed == pytest.approx(want, rel=1e-3)
        if name != "moe":
            over = found["derived"][name]["tokens/s of this plugin over it"]
            assert over == pytest.approx(speeds["moe"] / speed, rel=1e-3)
    assert result["goals"] == []  # they hold for the preset, not for overrides
    # the same seeds and batches: both are the same model; fairseq logs three digits
    losses = found["losses"]
    assert losses["moe"] == pytest.approx(losses["dense"], abs=2e-3) and len(losses["moe"]) == 3
    assert losses["moe"] != pytest.approx(losses["flop-matched"], abs=2e-3)


def test_training_leaves_out_what_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("layers.available_memory", lambda device: 1000)
    result = rehearse("train", tmp_path, "--device cpu --tiny --one-by-one")
    assert list(result["results"]) == ["moe", "flop-matched"]
    assert "0.0 GB are available" in result["results"]["moe"]["not_run"]["dense"]


def test_generation(tmp_path):
    words = """--tiny --device cpu --experts 4 --steps 3 --grid 1x1,2x2
        --cases dense,int8,flop-matched,meta"""
    results = rehearse("generate", tmp_path, words)["results"]
    assert list(results) == ["1x1", "2x2"]
    for found in results.values():
        assert set(found["ms"]) == {"layer", "dense", "int8", "flop-matched"}
        assert set(found["not_run"]) == {"meta"}
        size = {name: of.get("weights MiB") for name, of in found["derived"].items()}
        assert size["int8"] < size["layer"] and size["flop-matched"] < size["layer"]
        step = found["ms"]["layer"]["forward"]["p50"] / 4
        assert found["derived"]["layer"]["ms per step"] == pytest.approx(step, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["small", "small-32"])  # fp32; bf16 of autocast
def test_swin(preset, tmp_path):
    result = rehearse("swin", tmp_path, f"--device cpu --preset {preset} --tiny --images 2")
    assert list(result["results"]) == ["inference, 2 images", "training, 2 images"]
    for found in result["results"].values():
        assert list(found["this_over"]) == ["dense formulation", "dense model"]
        assert 0.5 < found["this_over_masks_by_operations"] < 1
        if preset == "small":
            assert found["rms_error_ratio"] < 1e-5
    assert result["parameters"]["sparse"] > result["parameters"]["dense model"]


def test_count_of_balance(tmp_path):
    result = rehearse("balance", tmp_path, "--mode count --tokens 64")
    rows = result["results"]["busiest over mean"]["derived"]
    assert rows["4 ranks, one expert"]["before"] == 4
    assert len(rows) == 21 and all(row["after"] <= 1.05 for row in rows.values())
    assert [goal["reached"] for goal in result["goals"]] == [True]


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("layer", "--backends cuda", "--backends cuda"),
        ("layer", "--tokens 0", "--tokens 0"),
        ("layer", "--experts 6 --simulated-ranks 4", "6 experts"),
        ("layer", "--experts 4 --top-k 5", "top_k=5"),
        ("layer", "--preset huge", "--preset huge"),
        ("layer", "--tiny --clock processor --threads 2", "--clock processor: for one thread"),
        ("kernels", "--backends triton", "need a GPU"),
        ("train", "--variants moe,tutel", "tutel"),
        ("swin", "--tiny --images 0", "--images 0: at least 1"),
        ("swin", "--tiny --modes generation", "--modes generation"),
        ("generate", "--grid 8", "--grid 8"),
        ("alltoall", "", "at least 2 ranks"),
        ("steps", "--mode adaptive", "--mode adaptive"),
    ],
)
def test_refusals(capsys, monkeypatch, name, arguments, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        program(name).main(["--device", "cpu", *arguments.split()])
    assert message in capsys.readouterr().err
