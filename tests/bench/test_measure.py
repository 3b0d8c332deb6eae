"""Clock, percentiles and memory of the benchmarks."""

import time

import measure
import pytest
import record
import torch
from measure import Case, peak_memory, percentiles, time_cases
from record import describe_run

CPU = torch.device("cpu")


def test_percentiles():
    got = percentiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert got == pytest.approx({"min": 1.0, "p20": 2.0, "p50": 3.5, "p80": 5.0})


def test_cases_take_turns_and_rotate():
    calls, cleared = [], []
    leaf = torch.ones(1, requires_grad=True)

    def case(name):
        def forward(number):
            calls.append((name, number))
            cleared.append(leaf.grad is None)
            return (leaf * 2,), (torch.ones(1),)

        return Case(name, forward, lambda: [leaf])

    times = time_cases([case(name) for name in "abc"], CPU, repetitions=4, warmup=1)
    assert [name for name, _ in calls] == list("cababcbcacababc")
    assert all(cleared), "gradients of the repetition before were still there"
    assert leaf.grad is None
    for name in "abc":
        assert {phase: len(values) for phase, values in times[name].items()} == {
            "forward": 4, "backward": 4, "both": 4,
        }  # fmt: skip
        sums = [f + b for f, b in zip(times[name]["forward"], times[name]["backward"], strict=True)]
        assert times[name]["both"] == pytest.approx(sums)


def test_time_of_the_processor_is_not_that_of_waiting():
    case = Case("waits", lambda _: (time.sleep(0.05), ()))
    wall = time_cases([case], CPU, 1, warmup=0)["waits"]["forward"]
    busy = time_cases([case], CPU, 1, warmup=0, processor_time=True)["waits"]["forward"]
    assert wall[0] >= 50 and busy[0] < 25


def test_a_case_that_finds_no_memory_does_not_fit():
    def forward(_):
        raise torch.cuda.OutOfMemoryError("as CUDA says it")

    assert not measure.fits(Case("large", forward), CPU)
    assert measure.fits(Case("small", lambda _: ((torch.ones(1),), ())), CPU)


def test_peak_memory_sees_an_allocation():
    def forward(_):
        held = torch.ones(16 << 20)  # 64 MiB
        return (held.sum(),), ()

    case = Case("64 MiB", forward)
    peak_memory(case, CPU)
    got = peak_memory(case, CPU)
    if got is None:
        pytest.skip("the peak resident set cannot be reset on this system")
    assert got == pytest.approx(64 << 20, rel=0.1)


def test_commit_where_there_is_no_repository(tmp_path, monkeypatch):
    """A copy of the files alone does not know its commit, nor whether it is changed."""

    def described():
        result = describe_run("layer", CPU)
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
