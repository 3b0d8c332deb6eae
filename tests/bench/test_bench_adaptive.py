"""scripts/bench/bench_adaptive.py: its sums by hand, and a tiny run on two ranks."""

import json

import bench_adaptive
import pytest
import torch
import torch.distributed as dist
from helpers.distributed import run_ranks
from ranks import Ranks

TINY = [
    "--placement", "replicated", "--experts", "2", "--tokens", "16", "--model-dim", "8",
    "--hidden-dim", "16", "--phases", "1,2", "--steps", "5", "--samples", "1",
    "--decided-steps", "6",
]  # fmt: skip


def test_sums():
    fixed = {"a": {1.0: 1.0, 2.0: 5.0}, "b": {1.0: 2.0, 2.0: 3.0}}
    assert bench_adaptive.best_choices(fixed, [1.0, 2.0, 1.0]) == {1.0: "a", 2.0: "b"}
    tuned = {"tuner": [1.0, 2.0, 3.0, 4.0], "best": [1.0, 1.0, 2.0, 2.0], "choices": list("abba")}
    rows = bench_adaptive.by_phase(tuned, [1.0, 2.0], steps=2)
    assert [(row["ratio"], row["choice"]) for row in rows] == [(1.5, "b"), (1.75, "a")]


def test_what_a_decided_tuner_adds():
    seconds = {"tuner": [1.0, 1.0, 1.1], "alone": [1.0, 1.0, 1.0]}
    agreements = {"tuner": [0.003, 0.003, 0.004], "alone": [0.001, 0.001, 0.001]}
    regions = {"tuner": [0.006, 0.007, 0.006], "alone": [0.001, 0.001, 0.001]}
    found = bench_adaptive.cost_of_deciding(
        {"decided": seconds, "agreements": agreements, "regions": regions}
    )
    assert found["steps"] == pytest.approx((1, 1, 1.1))
    assert found["agreement_us"] == pytest.approx((2000, 2000, 3000))
    assert found["region_us"] == pytest.approx((5000, 5000, 6000))
    assert found["part"] == pytest.approx((0.003, 0.003, 0.0042))  # a fifth of the regions'


def _measure(folder):
    options = bench_adaptive.parse_arguments([*TINY, "--output", str(folder)])
    return bench_adaptive.run(
        options, Ranks(torch.device("cpu"), dist.get_rank(), dist.get_world_size(), "gloo")
    )


@pytest.mark.long
def test_a_tiny_run(tmp_path, capsys):
    result, other = run_ranks(_measure, 2, tmp_path)
    assert result["tuned"] == other["tuned"]  # ranks share their times
    # two ranks of one node, experts whole
    expected = {f"linear x{degree} r=1" for degree in (1, 2, 4, 8)} | {"linear x1 r=0"}
    assert set(result["fixed"]) == expected
    assert len(result["tuned"]["tuner"]) == 10 == len(result["tuned"]["best"])
    assert result["total"]["tuner"] == pytest.approx(sum(result["tuned"]["tuner"]))
    names = [text.split(" for ")[0] for text in result["tuned"]["choices"]]
    assert set(names) <= set(result["fixed"])
    for name, times in result["fixed"].items():
        assert result["fixed_totals"][name] == pytest.approx(5 * (times[1.0] + times[2.0]))
    assert [row["capacity_factor"] for row in result["phases"]] == [1.0, 2.0]
    decided = result["tuned"]["decided"]
    assert {name: len(times) for name, times in decided.items()} == {"tuner": 6, "alone": 6}
    deciding = result["deciding"]
    assert all(low <= middle <= high for low, middle, high in deciding.values())
    assert deciding["steps"][0] > 0 and deciding["region_us"][1] > 0
    bench_adaptive.show(result)
    assert "tuner/best" in capsys.readouterr().out
    assert json.loads((tmp_path / "adaptive-2-loopback.json").read_text()).keys() == result.keys()
