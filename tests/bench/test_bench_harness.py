"""Clock, turns, intervals, memory, goals and record of the benchmarks."""

import json
from argparse import Namespace

import harness
import pytest
import torch
from harness import Case, Goal, Point, call, sweep, time_cases
from program import Ranks
from record import median_interval

pytestmark = pytest.mark.long  # of programs in scripts/bench
RANKS = Ranks(torch.device("cpu"))


def options_of(folder):
    return Namespace(tiny=False, repetitions=None, output=folder / "x.json")


@pytest.mark.parametrize("count, low, high", [(5, 1, 5), (6, 1, 6), (9, 2, 8), (61, 23, 39)])
def test_interval_of_a_median(count, low, high):
    """By the table of the sign test; fewer than 6 values give their range."""
    found = median_interval(list(map(float, range(count, 0, -1))))
    assert found == (low, (count + 1) / 2, high)


def test_cases_take_turns_and_rotate():
    calls = []
    leaf = torch.ones(1, requires_grad=True)

    def case(name):
        def forward(number):
            assert leaf.grad is None, "gradients of the repetition before are still there"
            calls.append((name, number))
            return (leaf * 2,), (torch.ones(1),)

        return Case(name, forward, lambda: [leaf])

    times = {}
    time_cases([case(name) for name in "abc"], RANKS, 8, times, warmup=1)
    turns = [calls[first : first + 3] for first in range(0, len(calls), 3)]
    assert all({name for name, _ in turn} == set("abc") for turn in turns) and len(turns) == 9
    assert all(len({number for _, number in turn}) == 1 for turn in turns)
    assert len({turn[0][0] for turn in turns}) == 3, "always the same case begins"
    assert leaf.grad is None
    for of in times.values():
        assert {name: len(of[name]) for name in of} == dict.fromkeys(
            ("forward", "backward", "both"), 8
        )
        sums = [f + b for f, b in zip(of["forward"], of["backward"], strict=True)]
        assert of["both"] == pytest.approx(sums)


def swept(folder, points, **options):
    sweep("x", options_of(folder), RANKS, points, **options)
    return json.loads((folder / "x.json").read_text(encoding="utf-8"))


def test_an_interrupted_run_keeps_its_repetitions_and_prints_its_goals(tmp_path, capsys):
    turns = []

    def stops(_):
        turns.append(1)
        if len(turns) == 4:
            raise KeyboardInterrupt

    cases = [Case("this", call(stops)), Case("that", call(lambda _: None))]
    point = Point("p", cases, derive=lambda found: {"this": {"share": 0.5}})
    point.goals = [Goal("this", "share", 1.0, at_most=True), Goal("this", "unknown", 1.0)]
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, [point], repetitions=9, warmup=0)
    result = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    found = result["results"]["p"]
    assert result["complete"] is False and len(found["raw_ms"]["that"]["forward"]) == 3
    low, middle, high = found["this_over"]["that"]
    assert low <= middle <= high
    assert "goal: p, this: share at most 1: 0.50, reached" in capsys.readouterr().out


def test_what_finds_no_memory_is_left_out_at_once_or_later(tmp_path):
    calls = []

    def full(after):
        def run(_):
            calls.append(after)
            if calls.count(after) > after:
                raise torch.cuda.OutOfMemoryError("as CUDA says it")

        return call(run)

    figures = lambda found: {"a": {"x": found["ms"]["a"]}}  # noqa: E731  needs the case's times
    points = [Point("at once", [Case("a", full(0)), Case("b", call(print))])]
    points += [Point("later", [Case("a", full(1))], derive=figures)]
    points += [Point("fits", [Case("a", call(print))], derive=figures)]
    found = swept(tmp_path, points, repetitions=1)
    for name, run in (("at once", ["b"]), ("later", []), ("fits", ["a"])):
        point, why = found["results"][name], "it ran out of memory on this GPU"
        assert list(point["ms"]) == run and point["not_run"] == (
            {} if name == "fits" else {"a": why}
        )
    assert found["results"]["fits"]["derived"]["a"]["x"] and "complete" not in found


def test_formulations_that_differ_are_not_timed():
    x = torch.ones(3, requires_grad=True)

    def case(factor):
        return Case(f"times {factor}", lambda _: ((factor * x,), (torch.ones(3),)), lambda: [x])

    assert harness.agreement([case(2), case(2.0001)], [x], 1e-3)["times 2.0001"] < 1e-3
    with pytest.raises(RuntimeError, match="times 3 does not compute what times 2 does"):
        harness.agreement([case(2), case(3)], [x], 1e-3)
