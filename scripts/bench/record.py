"""Record of a benchmark: hardware, versions, command, commit; statistics, JSON and tables."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from program import Ranks, quiet_logs

from fairseq_tutel.command_line import columns

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "fairseq-fixed", "fairseq", "numpy")
# environment that changes what a benchmark measures
_SETTINGS = re.compile(
    r"^(OMP_NUM_THREADS|MKL_NUM_THREADS|THP_MEM_ALLOC_ENABLE|NCCL_|GLOO_|FAIRSEQ_TUTEL_|TRITON_)"
)


class Report:
    """Result of a benchmark: its goals, its table and its JSON file, all by the first rank."""

    def __init__(self, benchmark: str, ranks: Ranks, path: Path | str, **about):
        self._first, self._path, self._said = ranks.rank == 0, Path(path), set()
        self._about = {**describe_run(benchmark, ranks.device, ranks.world_size), **about}

    def write(self, measured: dict[str, Any], complete: bool = False) -> None:
        """Write what is measured so far and print new goals; print the table of a complete one."""
        if not self._first:
            return
        result = {**self._about, **measured}
        if complete:
            quiet_logs()
            show(result)
        for each in measured.get("goals", ()):
            if each["goal"] not in self._said:
                verdict = "reached" if each["reached"] else "NOT reached"
                say(f"goal: {each['goal']}: {each['ratio']:.2f}, {verdict}")
                self._said.add(each["goal"])
        write_json(result if complete else {**result, "complete": False}, self._path)
        if complete:
            say(f"written: {self._path}")


def show(result: dict[str, Any]) -> None:
    """Print a row for each case of each point."""
    hardware = result["hardware"]
    device = hardware.get("gpu") or f"{hardware['cpu']}, threads: {hardware['threads']}"
    say(f"{result['benchmark']} on {device}, {result['world_size']} rank(s)")
    rows = []
    for point, found in result["results"].items():
        for case in {**found["ms"], **found["derived"]}:
            row = {"": point, "case": case}
            row |= {f"{phase} ms": of["p50"] for phase, of in found["ms"].get(case, {}).items()}
            if found["this_over"]:
                row["this/that"] = found["this_over"].get(case)
            rows.append(row | found["derived"].get(case, {}))
        for case, reason in found["not_run"].items():
            say(f"{point}: {case}: not run: {reason}")
    say(table(rows))


def describe_run(benchmark: str, device: torch.device, world_size: int = 1) -> dict[str, Any]:
    """Return hardware, versions, commit, command and date of this process."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in _PACKAGES if name in installed}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    commit, changed = _commit()
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": commit,
        "uncommitted_changes": changed,
        "hardware": _hardware(device),
        "world_size": world_size,
        "versions": {"python": platform.python_version(), **versions},
        "environment": {k: v for k, v in sorted(os.environ.items()) if _SETTINGS.match(k)},
    }


def _command() -> str:
    """Return the command from the repository root, without output and absolute folders."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    pairs = zip(sys.argv, sys.argv[1:], strict=False)
    kept = [word for before, word in pairs if "--output" not in (before, word)]
    kept = [Path(word).name if os.path.isabs(word) else word for word in kept]
    command = shlex.join(["python", str(name), *kept])
    bed = os.environ.get("TWO_NODES")  # set by two_nodes.py: its own command
    return f"{bed} -- {command}" if bed else command


def _commit() -> tuple[str | None, bool | None]:
    """Return (commit, whether files differ from it); None if unknown.

    A copy without a repository has both in the environment variable COMMIT, as ``git describe
    --always --abbrev=40 --dirty`` prints them.
    """
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 30, "check": True}
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        given = subprocess.run(words, **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or not a checkout
        given = os.environ.get("COMMIT", "")
    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", given):
        return None, None
    return given.removesuffix("-dirty"), given.endswith("-dirty")


def _hardware(device: torch.device) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    match = info.exists() and re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))
    hardware: dict[str, Any] = {
        "cpu": match[1] if match else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware["gpu"] = properties.name
        hardware["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        hardware["compute_capability"] = f"{properties.major}.{properties.minor}"
    return hardware


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write a result, indented, lists of numbers on one line, floats to 5 digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(result), indent=1, ensure_ascii=False)
    numbers = re.compile(r"\[\s+((?:-?[\d.e+-]+,?\s*)+)\]")
    text = numbers.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    whole = path.with_name(path.name + ".new")  # a process that is killed leaves no half of one
    whole.write_text(text + "\n", encoding="utf-8")
    whole.replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return min, p20, p50 and p80, linearly interpolated."""
    found = numpy.percentile(values, (0, 20, 50, 80)).tolist()
    return dict(zip(("min", "p20", "p50", "p80"), found, strict=True))


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Return (low, median, high); the true median is inside with a probability of ``level``.

    By order statistics: of n values the k-th smallest and largest, with the largest k at which a
    fair coin shows fewer than k heads in n throws with a probability of at most (1 - level) / 2.
    Fewer than 6 values give their range.
    """
    ordered, n = sorted(values), len(values)
    k, below = 0, 0.5**n
    while below <= (1 - level) / 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return ordered[k - 1], statistics.median(ordered), ordered[n - k]


def ratio_of_pairs(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Return the interval of the median of one case's time over another's in the same turn."""
    return median_interval([a / b for a, b in zip(above, below, strict=True)])


def median_ratio(found: dict[str, Any], above: str, below: str) -> float:
    """Return the median of one case's time over another's, both passes, from a point's record."""
    raw = found["raw_ms"]
    return ratio_of_pairs(raw[above]["both"], raw[below]["both"])[1]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return columns by the rows' keys, the first one flush left.

    Numbers get 4 significant digits; three numbers are an interval around a median.
    """
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    return "\n".join(columns([names, *cells], right=range(1, len(names))))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple | list):
        low, middle, high = value
        return f"{middle:.3g} ({low:.3g}-{high:.3g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def say(text: str) -> None:
    """Print one line, or a table, at once."""
    print(text, flush=True)
