"""Benchmarks of exchanges, steps and balance at a tiny size on two ranks of this CPU."""

import json
import sys

import pytest
from helpers import commands
from helpers.benchmarks import ratio, rehearse

pytestmark = pytest.mark.long


def test_alltoall(tmp_path):
    words = "--device cpu --sizes 1K,256K --wires same,fp8 --iterations 2 --repetitions 2"
    result = rehearse("alltoall", tmp_path, words, ranks=2, phase="wall")
    assert result["backend"] == "gloo"
    assert [found["bytes"] for found in result["results"].values()] == [1024, 256 << 10]
    for found in result["results"].values():
        assert set(found["ms"]) == {"linear", "linear fp8", "2dh", "2dh fp8"}
        for name, derived in found["derived"].items():
            speed = found["bytes"] / (1e6 * found["ms"][name]["wall"]["p50"])
            assert derived["algbw GB/s"] == pytest.approx(speed, rel=1e-3)
            assert derived["busbw GB/s"] == pytest.approx(speed / 2, rel=1e-3)


def steps(tmp_path, words):
    return rehearse("steps", tmp_path, f"--device cpu --tiny {words}", ranks=2)["results"]


def test_steps_at_a_forced_load(tmp_path):
    (found,) = steps(tmp_path, "--mode load --utilisation 60,90 --tokens 500").values()
    assert list(found["derived"]) == ["60 %", "90 %"]
    assert found["derived"]["60 %"]["times faster"] == 1
    for percent in (60, 90):
        measured = found["derived"][f"{percent} %"]["utilisation %"]
        assert measured == pytest.approx(percent, abs=1)


def test_share_of_communication(tmp_path):
    (found,) = steps(tmp_path, "--mode share --experts 4").values()
    raw = {name: of["both"] for name, of in found["raw_ms"].items()}
    for name, derived in found["derived"].items():
        for column, rest in (("communication", "linear, fp32"), ("links alone", name)):
            share = 1 - ratio(raw[f"{rest}, copies"], raw[name])
            assert derived[f"{column} %"] == pytest.approx(100 * share, abs=0.1)


@pytest.mark.long
def test_steps_by_r(tmp_path):
    results = steps(tmp_path, "--mode r --experts 1 --top-k 1 --factors 1,2")
    assert list(results) == ["f=1", "f=2"]
    for found in results.values():
        assert set(found["derived"]) == {"r=0", "r=1", "r=2"} == set(found["ms"])
        assert found["derived"]["r=1"] == {"times faster than r=1": 1, "predicted": 1}


@pytest.mark.long
def test_the_tuner_beside_the_best_choice(tmp_path):
    words = "--device cpu --tiny --mode tuner --factors 1,2"
    result = rehearse("steps", tmp_path, words, ranks=2)
    results = result["results"]
    assert list(results) == ["f=1", "f=2", "phase 1, f=1", "phase 2, f=2"]
    # two ranks of one node, experts whole
    expected = {f"linear x{degree} r=1" for degree in (1, 2, 4, 8)} | {"linear x1 r=0"}
    seconds = {"tuner": 0.0, "best": 0.0}
    for number, factor in enumerate((1, 2), start=1):
        fixed, phase = results[f"f={factor}"], results[f"phase {number}, f={factor}"]
        assert set(fixed["ms"]) == expected
        best = min(expected, key=lambda name: fixed["ms"][name]["both"]["p50"])
        assert list(fixed["derived"]) == [best] == [phase["derived"]["best"]["choice"]]
        assert phase["derived"]["tuner"]["choice"] in expected
        for name in seconds:
            raw = phase["raw_ms"][name]["both"]
            assert len(raw) == 5
            seconds[name] += sum(raw)
        over = phase["derived"]["tuner"]["over the best, so far"]
        assert over == pytest.approx(seconds["tuner"] / seconds["best"], rel=1e-3)
    assert [goal["bound"] for goal in result["goals"]] == [1.10]


def test_balance(tmp_path):
    words = """--tokens 48 --model-dim 16 --hidden-dim 24 --experts 4 --repetitions 3 --threads 1
        --min-rows 1 --utilisations 50"""
    result = rehearse("balance", tmp_path, words, ranks=2)
    found = result["results"]["50 %"]
    assert found["loads"] == {"even": [96, 96], "not helped": [192, 0], "helped": [96, 96]}
    assert found["links"]["not helped"] == [[0, 96], [96, 0]] and found["bytes_moved"] > 0
    assert len(result["goals"]) == 3


@pytest.mark.long
def test_training_by_the_launcher(tmp_path):
    """A preset of one simulated rank becomes one of real ranks."""
    path = tmp_path / "train.json"
    launcher = ["-m", "fairseq_tutel.launch", "--nproc-per-node", "2", "--bind", "none", "--"]
    program = [sys.executable, "scripts/bench/bench_train.py", "--output", str(path)]
    words = "--device cpu --preset meta-8gpu-rank --tiny --variants moe"
    commands.run([sys.executable, *launcher, *program, *words.split()], timeout=120)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["world_size"], result["settings"]["experts"]) == (2, 4)
    assert result["settings"]["simulated_ranks"] == 0
