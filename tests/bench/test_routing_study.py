"""scripts/bench/routing_study.py: one short run of each kind, the table and its figure."""

import json

import pytest
import routing_step_time
import routing_study


def test_the_study_runs_and_records(tmp_path, capsys):
    file = tmp_path / "routing.json"
    words = ["--methods", "nothing", "quantile bias + re-routing", "--seeds", "1", "--no-step-time"]
    assert routing_study.main([*words, "--updates", "4", "--output", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = {(row["method"], row["capacity_factor"]): row for row in result["table"]}
    assert set(rows) == {("nothing", 1), ("quantile bias + re-routing", 1), ("nothing", 0)}
    padded, free = rows["nothing", 1], rows["nothing", 0]
    assert padded["slot"] == pytest.approx(100 - padded["drop"], abs=0.01)  # at f = 1
    assert padded["drop"] == pytest.approx(padded["drop_at_1"], abs=0.01)
    assert free["drop"] == 0 < free["drop_at_1"]
    assert 3 < free["nats"] < 8
    assert "| nothing | 1 | 1 |" in capsys.readouterr().out
    assert result["complete"]
    # a call that was interrupted goes on: nothing is left to do
    result["complete"] = False
    result["runs"][0]["nats"] = 5.25
    file.write_text(json.dumps(result), encoding="utf-8")
    assert routing_study.main([*words, "--updates", "4", "--output", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["table"][0]["nats"] == 5.25
    pytest.importorskip("matplotlib")
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_share_of_a_step_that_scales_is_that_of_its_definition():
    rows = [{"util_rank": u, "ms": 20 * (0.4 + 0.6 * 100 / u)} for u in (100, 80, 72, 50)]
    assert routing_step_time.share_that_scales(rows) == pytest.approx(0.6)
