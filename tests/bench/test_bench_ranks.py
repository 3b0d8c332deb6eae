"""Benchmarks of exchanges, steps and balance at a tiny size on two ranks of this CPU."""

import pytest
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


def at_a_forced_load(found):
    assert found["derived"]["60 %"]["times faster"] == 1
    for percent in (60, 90):
        measured = found["derived"][f"{percent} %"]["utilisation %"]
        assert measured == pytest.approx(percent, abs=1)


def share_of_communication(found):
    raw = {name: of["both"] for name, of in found["raw_ms"].items()}
    for name, derived in found["derived"].items():
        for column, rest in (("communication", "linear, fp32"), ("links alone", name)):
            share = 1 - ratio(raw[f"{rest}, copies"], raw[name])
            assert derived[f"{column} %"] == pytest.approx(100 * share, abs=0.1)


def by_r(found):
    assert set(found["derived"]) == {"r=0", "r=1", "r=2"} == set(found["ms"])
    assert found["derived"]["r=1"] == {"times faster than r=1": 1, "predicted": 1}


@pytest.mark.parametrize("words, points, check", [
    ("--mode load --utilisation 60,90 --tokens 500", 1, at_a_forced_load),
    ("--mode share --experts 4", 1, share_of_communication),
    ("--mode r --experts 1 --top-k 1 --factors 1,2", 2, by_r),
])  # fmt: skip
def test_steps(words, points, check, tmp_path):
    results = rehearse("steps", tmp_path, f"--device cpu --tiny {words}", ranks=2)["results"]
    assert len(results) == points
    for found in results.values():
        check(found)


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
        for name in seconds:
            seconds[name] += sum(phase["raw_ms"][name]["both"])
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
