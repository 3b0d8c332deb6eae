"""Clock, turns, intervals, memory, goals and record of the benchmarks."""

import json
import time
from argparse import Namespace
from collections import Counter

import harness
import pytest
import record
import torch
from harness import Case, Goal, Point, call, peak_memory, sweep, time_cases
from program import Ranks
from record import median_interval

pytestmark = pytest.mark.long  # of programs in scripts/bench
RANKS = Ranks(torch.device("cpu"))


def options(path):
    return Namespace(tiny=False, repetitions=None, output=path)


@pytest.mark.parametrize("count, low, high", [(5, 1, 5), (6, 1, 6), (9, 2, 8), (61, 23, 39)])
def test_interval_of_a_median(count, low, high):
    """By the table of the sign test; fewer than 6 values give their range."""
    found = median_interval(list(map(float, range(count, 0, -1))))
    assert found == (low, (count + 1) / 2, high)


def test_cases_take_turns_and_rotate():
    calls, cleared = [], []
    leaf = torch.ones(1, requires_grad=True)

    def case(name):
        def forward(number):
            calls.append((name, number))
            cleared.append(leaf.grad is None)
            return (leaf * 2,), (torch.ones(1),)

        return Case(name, forward, lambda: [leaf])

    times = {}
    time_cases([case(name) for name in "abc"], RANKS, 8, times, warmup=1)
    turns = [calls[first : first + 3] for first in range(0, len(calls), 3)]
    assert all({name for name, _ in turn} == set("abc") for turn in turns) and len(turns) == 9
    assert all(len({number for _, number in turn}) == 1 for turn in turns)
    assert len(Counter(turn[0][0] for turn in turns)) == 3, "always the same case begins"
    assert all(cleared), "gradients of the repetition before were still there"
    assert leaf.grad is None
    for of in times.values():
        assert {phase: len(values) for phase, values in of.items()} == {
            "forward": 8, "backward": 8, "both": 8,
        }  # fmt: skip
        sums = [f + b for f, b in zip(of["forward"], of["backward"], strict=True)]
        assert of["both"] == pytest.approx(sums)


def test_clocks():
    """A processor's time is not that of waiting; ``wall`` is that of one of several calls."""
    case = Case("waits", call(lambda _: time.sleep(0.05)))
    wall, busy = {}, {}
    time_cases([case], RANKS, 1, wall, warmup=0, calls=3)
    time_cases([case], RANKS, 1, busy, warmup=0, clock="processor")
    (wall,), (busy,) = wall["waits"]["wall"], busy["waits"]["forward"]
    assert wall >= 50 and busy < 0.5 * wall


def test_an_interrupted_run_keeps_its_repetitions_and_prints_its_goals(tmp_path, capsys):
    turns = []

    def stops(_):
        turns.append(1)
        if len(turns) == 4:
            raise KeyboardInterrupt

    path = tmp_path / "x.json"
    cases = [Case("this", call(stops)), Case("that", call(lambda _: None))]
    point = Point("p", cases, derive=lambda found: {"this": {"share": 0.5}})
    point.goals = [Goal("this", "share", 1.0, at_most=True), Goal("this", "unknown", 1.0)]
    with pytest.raises(KeyboardInterrupt):
        sweep("x", options(path), RANKS, [point], repetitions=9, warmup=0)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["complete"] is False
    found = result["results"]["p"]
    assert len(found["raw_ms"]["that"]["forward"]) == 3
    low, middle, high = found["this_over"]["that"]
    assert low <= middle <= high
    assert "goal: p, this: share at most 1: 0.50, reached" in capsys.readouterr().out


def test_goals_are_printed_once_as_a_point_ends(tmp_path, capsys):
    said = []

    def points():
        for name in "ab":
            figures = lambda found: {"this": {"share": 2.0}}  # noqa: E731
            case, bound = Case("this", call(lambda _: None)), Goal("this", "share", 3.0)
            yield Point(name, [case], derive=figures, goals=[bound])
            said.append(capsys.readouterr().out)

    sweep("x", options(tmp_path / "x.json"), RANKS, points(), repetitions=1)
    said.append(capsys.readouterr().out)
    for name, text in zip("ab", said, strict=False):
        assert f"goal: {name}, this: share at least 3: 2.00, NOT reached" in text
    assert "".join(said).count("goal:") == 2 and "written" in said[-1]


def test_what_finds_no_memory_is_left_out(tmp_path):
    def full(_):
        raise torch.cuda.OutOfMemoryError("as CUDA says it")

    points = [Point("p", [Case("large", call(full)), Case("small", call(print))])]
    sweep("x", options(tmp_path / "x.json"), RANKS, points, repetitions=1)
    found = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["results"]["p"]
    assert found["not_run"] == {"large": "it ran out of memory on this GPU"}
    assert list(found["ms"]) == ["small"]


def test_what_finds_no_memory_later_ends_only_its_point(tmp_path):
    calls = []

    def full_at_last(_):
        calls.append(0)
        if len(calls) > 1:
            raise torch.cuda.OutOfMemoryError("as CUDA says it")

    figures = lambda found: {"a": {"x": found["ms"]["a"]}}  # noqa: E731  needs the case's times
    points = [Point(name, [Case("a", call(run))], derive=figures)
              for name, run in (("p", full_at_last), ("q", print))]  # fmt: skip
    sweep("x", options(tmp_path / "x.json"), RANKS, points, repetitions=1)
    found = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert found["results"]["p"]["not_run"] == {"a": "it ran out of memory on this GPU"}
    assert found["results"]["q"]["derived"]["a"]["x"] and "complete" not in found


def test_peak_memory_sees_an_allocation():
    def forward(_):
        held = torch.ones(16 << 20)  # 64 MiB
        return (held.sum(),), ()

    case = Case("64 MiB", forward)
    peak_memory(case, RANKS.device)
    got = peak_memory(case, RANKS.device)
    if got is None:
        pytest.skip("the peak resident set cannot be reset on this system")
    assert got == pytest.approx(64 << 20, rel=0.1)


def test_formulations_that_differ_are_not_timed():
    x = torch.ones(3, requires_grad=True)

    def case(factor):
        return Case(f"times {factor}", lambda _: ((factor * x,), (torch.ones(3),)), lambda: [x])

    assert harness.agreement([case(2), case(2.0001)], [x], 1e-3)["times 2.0001"] < 1e-3
    with pytest.raises(RuntimeError, match="times 3 does not compute what times 2 does"):
        harness.agreement([case(2), case(3)], [x], 1e-3)


def test_commit_where_there_is_no_repository(tmp_path, monkeypatch):
    """A copy of the files alone does not know its commit, nor whether it is changed."""

    def described():
        result = record.describe_run("layer", RANKS.device)
        return result["commit"], result["uncommitted_changes"]

    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for given, want in (
        ("", (None, None)), ("main", (None, None)), ("12ab34c", ("12ab34c", False)),
        (f"{'0' * 40}-dirty", ("0" * 40, True)),
    ):  # fmt: skip
        monkeypatch.setenv("COMMIT", given)
        assert described() == want
    monkeypatch.undo()
    commit, changed = described()
    assert commit is None or (len(commit) == 40 and changed in (False, True))
