"""study_swin on a few digits: what it writes is what its trainings did."""

import json
import statistics

import pytest
import study_swin
import torch
from swin_work import example

METHODS = ["dense", "losses", "load bias"]
PAIRS = ["losses/dense", "load bias/dense", "load bias/losses"]


@pytest.fixture
def few_digits(monkeypatch):
    data = example("data")
    train, test = data.load("digits", 32)
    parts = tuple(
        data.Images(part.items[:count], part.labels[:count], part.names, part.size)
        for part, count in ((train, 256), (test, 100))
    )
    monkeypatch.setattr(data, "load", lambda *_: parts)


def run(path, *arguments):
    words = ["--data", "digits", "--methods", ",".join(METHODS), "--repetitions", "2"]
    assert study_swin.main([*words, *arguments, "--output", str(path)]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.long
def test_a_study_and_its_steps(few_digits, tmp_path, capsys):
    arguments = ["--seeds", "2", "--epochs", "1", "--save-dir", str(tmp_path / "kept")]
    result = run(tmp_path / "study.json", *arguments)
    runs = {(one["method"], one["seed"]): one for one in result["runs"]}
    assert list(runs) == [(method, seed) for seed in (1, 2) for method in METHODS]
    for row in result["table"]:
        seeds = [runs[row["method"], seed]["accuracy"] for seed in (1, 2)]
        assert row["accuracy"]["mean"] == pytest.approx(statistics.mean(seeds), abs=1e-2)
        assert row["accuracy"]["range"] == [min(seeds), max(seeds)]
    dense, losses, biased = result["table"]
    assert "use" not in dense
    for row in (losses, biased):  # 4 experts of which none gets all: 25 to 100 %
        assert 25 < row["use"]["load"] <= 100 and row["use"]["slot"] <= 80.1
        # of 1.25 slots a token those are in use whose choice was not dropped
        assert row["use"]["slot"] == pytest.approx((100 - row["use"]["drop"]) / 1.25, rel=1e-2)
    assert losses["use"] != biased["use"]
    assert list(result["step"]["over"]) == PAIRS

    (tmp_path / "study.json").write_text(  # as it was after three of six trainings
        json.dumps({"complete": False, "runs": result["runs"][:3]}), encoding="utf-8"
    )
    more = run(tmp_path / "study.json", *arguments)
    alike = [
        [{**one, "seconds": 0, "cpu_seconds": 0} for one in of["runs"]] for of in (result, more)
    ]
    assert alike[0] == alike[1] and "complete" not in more

    again = runs["load bias", 2]
    capsys.readouterr()
    assert example("train").main(again["command"][1:]) == 0  # as the file says, by the example
    assert f"held-out accuracy {again['accuracy']:.2f} %" in capsys.readouterr().out

    steps = run(tmp_path / "steps.json", "--step-times", str(tmp_path / "kept"))
    assert steps["util_rank"] == {"losses": 100, "load bias": 100}  # one rank has everything
    times = {name: of for name, of in steps["step"]["raw_ms"].items()}
    pairs = [a / b for a, b in zip(times["losses"], times["dense"], strict=True)]
    assert steps["step"]["over"]["losses/dense"]["interval"] == pytest.approx(sorted(pairs), 1e-3)


def test_models_of_equal_work(few_digits):
    """Tokens times one network each, whatever the experts are; what is besides is named."""
    words = {name: ["--data", "digits", *study_swin.METHODS[name]] for name in ("dense", "losses")}
    ranks = study_swin.Ranks(torch.device("cpu"))
    of = {name: study_swin.model_of(study_swin.Run(each, ranks)) for name, each in words.items()}
    dense, sparse = of["dense"], of["losses"]
    assert dense["macs_per_image"] == dense["macs_per_image_with_empty_rows"]
    gates = 2 * 16 * 64 * 4  # two layers, tokens, channels, experts
    assert sparse["macs_per_image"] - dense["macs_per_image"] == gates
    empty = sparse["macs_per_image_with_empty_rows"] - sparse["macs_per_image"]
    assert empty == 2 * 0.25 * 16 * 8 * 64**2
    dropless = study_swin.Run([*words["losses"], *study_swin.DROPLESS], ranks)
    assert set(study_swin.model_of(dropless).values()) == {
        sparse["parameters"], sparse["macs_per_image"],
    }  # fmt: skip


def test_refusals(few_digits, capsys, tmp_path):
    assert study_swin.main(["--methods", "sinkhorn"]) == 2
    assert "--methods sinkhorn" in capsys.readouterr().err
    (tmp_path / "used").touch()
    assert study_swin.main(["--data", "digits", "--save-dir", str(tmp_path)]) == 2
    assert f"--save-dir {tmp_path}: not empty" in capsys.readouterr().err
    assert study_swin.main(["--data", "digits", "--step-times", str(tmp_path)]) == 2
    assert f"no {tmp_path}/digits-dense/checkpoint_last.pt" in capsys.readouterr().err
