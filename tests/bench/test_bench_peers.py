"""bench_peers: layers of others are imported from folders; those that are missing are left out."""

import json
import statistics

import bench_peers
import pytest
import torch
from helpers.dispatched import spied
from measure import median_interval

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


def test_what_is_there_is_compared(tmp_path):
    (tmp_path / "tutel").mkdir()
    (tmp_path / "tutel" / "__init__.py").touch()
    (tmp_path / "tutel" / "moe.py").write_text(_TUTEL, encoding="utf-8")
    path = tmp_path / "peers.json"
    arguments = ["--tiny", "--shapes", "base,top8", "--repetitions", "7", "--output", str(path)]
    assert bench_peers.main([*arguments, "--tutel", str(tmp_path)]) == 0
    row = json.loads(path.read_text(encoding="utf-8"))["results"]["top8"]
    assert row["not_run"] == dict.fromkeys(("meta", "meta+tutel", "mixtral"), "no folder was given")
    assert set(row["against"]) == {"experts", "tutel", "tutel dropless"}
    low, high = row["against"]["tutel"]["interval"]
    raw = row["raw_ms"][0]["tutel"]
    pairs = zip(raw["padded"], raw["tutel"], strict=True)
    assert low > 1  # a Linear is faster than any layer with experts
    assert abs(low / min(mine / theirs for mine, theirs in pairs) - 1) < 1e-3  # of 7: the range
    assert row["against"]["tutel"]["not_slower"] is (high < 1.02)


def test_processes_are_what_is_compared(tmp_path, monkeypatch):
    path = tmp_path / "peers.json"
    calls = spied(monkeypatch, bench_peers.subprocess, "run")
    arguments = ["--tiny", "--shapes", "base", "--repetitions", "3", "--output", str(path)]
    assert bench_peers.main([*arguments, "--processes", "2", "--seed", "5"]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    row = result["results"]["base"]
    medians = []
    for process in row["raw_ms"]:
        times = process["experts"]
        pairs = zip(times["padded"], times["experts"], strict=True)
        medians.append(statistics.median(mine / theirs for mine, theirs in pairs))
    assert len(medians) == result["processes"] == 2
    assert row["against"]["experts"]["interval"] == pytest.approx(sorted(medians), rel=1e-3)
    assert row["against"]["experts"]["ratio"] == pytest.approx(sum(medians) / 2, rel=1e-3)
    commands = [args[0] for args, _, _ in calls if "--seed" in args[0]]  # not those of git
    for seed, command in enumerate(commands, start=5):
        given = bench_peers.parse_arguments(command[2:])
        assert (given.seed, given.processes, given.threads) == (seed, 1, torch.get_num_threads())
    assert len(commands) == 2


def test_a_process_that_fails_is_named(monkeypatch, capsys):
    monkeypatch.setattr(bench_peers, "__file__", "nowhere.py")
    assert bench_peers.main(["--tiny", "--processes", "2"]) == 2
    assert "process 1 ended with 2: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_peers.main(["--processes", "5"])
    assert "give 6 --processes" in capsys.readouterr().err


def test_interval_of_a_median():
    # tables of the sign test: 6th and 16th of 21, 2nd and 9th of 10
    assert median_interval(list(range(1, 22))) == (6, 11, 16)
    assert median_interval([10, 9, 8, 7, 6, 5, 4, 3, 2, 1]) == (2, 5.5, 9)
    assert median_interval([3, 1, 2]) == (1, 2, 3)
