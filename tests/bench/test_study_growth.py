"""study_growth without its trainings: the clock, the curves, the commands, the figure."""

import shlex
from types import SimpleNamespace

import pytest
import study_growth
from fairseq import options
from study_growth import VARIANTS, Curve, Study, as_dense, draw, seconds_until, summarise

VALID = "| INFO | valid | epoch 001 | valid on 'valid' subset | loss {} | ppl 9 | num_updates {}"


def test_the_clock_stands_still_while_the_loss_is_validated(monkeypatch):
    now, curve = [0.0], Curve()
    monkeypatch.setattr(study_growth.time, "perf_counter", lambda: now[0])
    for seconds, line in (
        (7, "loading data"),
        (10, "Start iterating over samples"),
        (13, 'begin validation on "valid" subset'),
        (20, VALID.format(9.5, 2)),
        (24, "Start iterating over samples"),  # of the next epoch
        (25, 'begin validation on "valid" subset'),
        (99, VALID.format(9.25, 4)),
    ):
        now[0] = float(seconds)
        curve.listen(line)
    assert curve.points == [(2, 3.0, 9.5), (4, 8.0, 9.25)]
    second = Curve([(4, 1.0, 9.0), (6, 2.0, 8.0)])
    assert second.after(curve, 2, anew=False).points == [
        (2, 3.0, 9.5),
        (4, 4.0, 9.0),
        (6, 5.0, 8.0),
    ]
    assert second.after(curve, 2, anew=True).points == [(2, 3.0, 9.5), (6, 4.0, 9.0), (8, 5.0, 8.0)]


@pytest.mark.parametrize("name", VARIANTS)
def test_commands_are_fairseqs(name, tmp_path):
    settings = SimpleNamespace(folder=tmp_path, updates=600, validations=24)
    words = shlex.split(Study(settings, tmp_path / "data", 5)._command(VARIANTS[name], 600))
    given = words[words.index("fairseq-train") + 1 :]
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=given)
    variant = VARIANTS[name]
    assert args.seed == 5 and args.max_update == (300 if variant.anew else 600)
    assert args.lr_period_updates == args.max_update - 30 and args.validate_interval_updates == 25
    assert args.arch == "transformer_lm_gpt" + ("_moe" if variant.experts else "")
    assert getattr(args, "moe_expert_count", 0) == variant.experts
    assert getattr(args, "moe_capacity_factor", None) == (0 if variant.experts else None)


def test_what_others_begin_as_ends_with_the_half_unless_it_is_asked_for(tmp_path, monkeypatch):
    trained = []

    def train(self, name, variant, source, last):
        trained.append((name, last, source and source["curve"]))
        return {"variant": name, "curve": [last]}

    monkeypatch.setattr(Study, "_train", train)
    settings = SimpleNamespace(folder=tmp_path, updates=600, validations=24, variants=["grown"])
    study = Study(settings, tmp_path / "data", 1)
    study.run("grown"), study.run("grown")
    assert trained == [("few", 300, None), ("grown", 600, [300])]
    settings.variants = ["few", "grown-exact"]
    assert study.run("few")["curve"] == [600] and study.run("grown-exact")["curve"] == [600]
    assert trained[2:] == [("few", 600, None), ("grown-exact", 600, [600])]
    short, whole = (study._command(VARIANTS["few"], last).split() for last in (300, 600))
    assert [pair for pair in zip(short, whole, strict=True) if pair[0] != pair[1]] == [
        ("300", "600")
    ]


def test_as_dense_keeps_what_is_not_of_experts():
    words = [
        "--lr",
        "1",
        "--moe-freq",
        "2",
        "--arch",
        "transformer_lm_gpt_moe",
        "--seed",
        "3",
        "--moe-top-k",
        "2",
    ]
    assert as_dense(words) == ["--lr", "1", "--arch", "transformer_lm_gpt", "--seed", "3"]


def test_the_table_and_the_figure(tmp_path):
    losses = {1: [10, 9, 8.5, 8.2, 8.1, 8.0], 2: [10, 9, 8.5, 8.2, 8.1, 8.2]}
    seconds = {
        1: [1, 2, 3, 5, 7, 9],
        2: [1, 2, 99, 101, 103, 105],
    }  # 2 s per update, disturbed once
    points = {
        seed: [*zip(range(1, 7), seconds[seed], losses[seed], strict=True)] for seed in (1, 2)
    }
    runs = [
        {"variant": name, "seed": seed, "curve": points[seed]}
        for name in ("dense", "upcycled")
        for seed in (1, 2)
    ]
    table = summarise(runs, 3)
    assert [row["variant"] for row in table] == ["dense", "upcycled"]
    assert table[0]["loss"] == {"mean": pytest.approx(8.1), "range": [8.0, 8.2]}
    assert table[0]["seconds"] == 3 * 1 + 3 * 2
    assert seconds_until([1, 3, 5], runs, "upcycled", 3) == [1, 3, 7]
    result = {"table": table, "runs": runs, "settings": {"updates": 6}}
    draw(result, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000
