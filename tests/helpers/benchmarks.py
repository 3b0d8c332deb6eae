"""Rehearse the programs of scripts/bench in this process, or on two ranks."""

import importlib
import json
import statistics
import sys

import pytest
from helpers.commands import ROOT
from helpers.distributed import run_ranks

FOLDER = ROOT / "scripts" / "bench"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("bench_*.py"))


def program(name):
    """Import a program; its folder holds scripts, not a package."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(f"bench_{name}")


def rehearse(name, folder, words, ranks=1, phase=None):
    """Run a program and return its record, whose times and ratios fit each other.

    Args:
        phase: that ratios are of (default: both passes).
    """
    path = folder / f"{name}.json"
    argv = ["--output", str(path), *words.split()]
    if ranks == 1:
        assert program(name).main(argv) == 0
    else:
        run_ranks(_main, ranks, name, argv)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "command", "hardware", "versions", "commit"} <= result.keys()
    assert result["world_size"] == ranks and "complete" not in result
    for found in result["results"].values():
        check_point(found, phase)
    return result


def _main(name, argv):
    assert program(name).main(argv) == 0


def check_point(found, phase=None):
    """Compare percentiles with the raw times, and ratios with those of pairs."""
    if not found["raw_ms"] or isinstance(found["raw_ms"], list):  # of several processes
        return
    for name, phases in found["raw_ms"].items():
        for each, times in phases.items():
            ms = found["ms"][name][each]
            assert ms["min"] <= ms["p20"] <= ms["p50"] <= ms["p80"]
            assert ms["p50"] == pytest.approx(statistics.median(times), rel=1e-3)
    first, *_ = found["raw_ms"].values()
    phase = phase or ("both" if "both" in first else "forward")
    for name, (low, middle, high) in found["this_over"].items():
        other = found["raw_ms"][name]
        of_pairs = ratio(first[phase], other.get(phase, other["forward"]))
        assert low <= middle <= high and middle == pytest.approx(of_pairs, rel=1e-3)


def ratio(above, below):
    """Return the median of one case's time over another's in the same turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
