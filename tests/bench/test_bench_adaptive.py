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
    "--closed-steps", "4",
]  # fmt: skip


def test_sums():
    fixed = {"a": {1.0: 1.0, 2.0: 5.0}, "b": {1.0: 2.0, 2.0: 3.0}}
    summary = bench_adaptive.Summary.of(fixed, [1.0, 2.0, 1.0], steps=10)
    assert summary.best == {1.0: "a", 2.0: "b"}
    assert summary.totals == {"a": 70.0, "b": 70.0}
    tuned = {"tuner": [1.0, 2.0, 3.0, 4.0], "best": [1.0, 1.0, 2.0, 2.0], "choices": list("abba")}
    rows = bench_adaptive.by_phase(tuned, [1.0, 2.0], steps=2)
    assert [(row["ratio"], row["choice"]) for row in rows] == [(1.5, "b"), (1.75, "a")]
    assert bench_adaptive.runs_of("abba") == ["a for 1 step", "b for 2 steps", "a for 1 step"]


def _measure():
    options = bench_adaptive.parse_arguments(TINY)
    return bench_adaptive.run(
        options, Ranks(torch.device("cpu"), dist.get_rank(), dist.get_world_size(), "gloo")
    )


def test_a_tiny_run(tmp_path, capsys):
    result, other = run_ranks(_measure, 2)
    assert result["tuned"] == other["tuned"]  # ranks share their times
    # two ranks of one node, experts whole
    expected = {f"linear x{degree} r=1" for degree in (1, 2, 4, 8)} | {"linear x1 r=0"}
    assert set(result["fixed"]) == expected
    assert len(result["tuned"]["tuner"]) == 10 == len(result["tuned"]["best"])
    assert result["total"]["tuner"] == pytest.approx(sum(result["tuned"]["tuner"]))
    names = [text.split(" for ")[0] for text in result["tuned"]["choices"]]
    assert set(names) <= set(result["fixed"])
    assert [row["capacity_factor"] for row in result["phases"]] == [1.0, 2.0]
    bench_adaptive.show(result)
    assert "tuner/best" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    result = json.loads(json.dumps(result))
    picture = tmp_path / "adaptive.png"
    assert bench_adaptive.figures.draw(result, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_rank_is_refused(capsys):
    assert bench_adaptive.main(TINY) == 2
    assert "at least 2 ranks" in capsys.readouterr().err
