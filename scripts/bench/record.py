"""What a result must hold besides its numbers, and how results are written and printed."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.command_line import columns

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "fairseq-fixed", "fairseq", "numpy")
# Environment that changes what a benchmark measures.
_SETTINGS = re.compile(
    r"^(OMP_NUM_THREADS|MKL_NUM_THREADS|THP_MEM_ALLOC_ENABLE|NCCL_|GLOO_|FAIRSEQ_TUTEL_|TRITON_)"
)


def describe_run(benchmark: str, device: torch.device, world_size: int = 1) -> dict[str, Any]:
    """Hardware, versions, commit, command and date of this process, as a result begins."""
    commit, changed = _commit()
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": commit,
        "uncommitted_changes": changed,
        "hardware": _hardware(device),
        "world_size": world_size,
        "versions": {"python": platform.python_version(), **_versions()},
        "environment": {k: v for k, v in sorted(os.environ.items()) if _SETTINGS.match(k)},
    }


def _command() -> str:
    """As it can be called from the repository root; where it wrote its results does not matter."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    words = [
        word
        for before, word in zip(sys.argv, sys.argv[1:], strict=False)
        if not {before, word} & {"--output", "--figure"}
    ]
    return shlex.join(["python", str(name), *words])


def _commit() -> tuple[str | None, bool | None]:
    """(commit, whether files differ from it) of this checkout, None for what is unknown.

    Of a copy without a repository the environment variable COMMIT holds both, as ``git describe
    --always --abbrev=40 --dirty`` prints them.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is not None:
        return commit, bool(_git("status", "--porcelain", "--untracked-files=no"))
    given = os.environ.get("COMMIT", "")
    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", given):
        return None, None
    return given.removesuffix("-dirty"), given.endswith("-dirty")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git, or not a checkout
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _hardware(device: torch.device) -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "cpu": _cpu_name(),
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


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1] if match else platform.processor()


class OtherLoad:
    """How much of this machine's CPU time others took since this was made."""

    def __init__(self):
        self._begin = self._times()

    @staticmethod
    def _times() -> tuple[float, float, float] | None:
        """Seconds of all CPUs: existing, busy, working for this process; None if unknown."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        except OSError:
            return None
        # user nice system idle iowait irq softirq steal; guest time is in user already
        ticks = [int(word) for word in line.split()[1:9]]
        scale = os.sysconf("SC_CLK_TCK")
        own = sum(os.times()[:4])
        return sum(ticks) / scale, (sum(ticks) - ticks[3] - ticks[4]) / scale, own

    def share(self, siblings: float = 0.0) -> float | None:
        """Of the time of all CPUs, 0 to 1; a result with a large share is not worth keeping.

        Args:
            siblings: seconds that other ranks of the measurement took on this machine.
        """
        end = self._times()
        if self._begin is None or end is None:
            return None
        total, busy, own = (b - a for a, b in zip(self._begin, end, strict=True))
        return max(0.0, busy - own - siblings) / total if total > 0 else None


class Journal:
    """Writes a result while it is measured, so that a run that is stopped loses seconds only.

    Args:
        path: of the JSON file; None writes nothing.
        seconds: between two writes at least.
    """

    def __init__(self, path: Path | None, seconds: float = 5.0):
        self._path, self._seconds = path, seconds
        self._last = -math.inf

    def keep(self, result: Callable[[], dict[str, Any]]) -> None:
        """Write what ``result`` returns, marked as not complete, if it is time to."""
        if self._path is not None and time.monotonic() - self._last >= self._seconds:
            write_json({**result(), "complete": False}, self._path)
            self._last = time.monotonic()


def device_name(result: dict[str, Any]) -> str:
    """The device of a result in a few words."""
    hardware = result["hardware"]
    threads = hardware["threads"]
    return hardware.get("gpu") or f"{threads} thread{'s'[: threads != 1]} of {hardware['cpu']}"


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write a result, indented, lists of numbers on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(result), indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+((?:-?[\d.e+-]+,?\s*)+)\]", _on_one_line, text)
    whole = path.with_name(path.name + ".new")  # a process that is killed leaves no half of one
    whole.write_text(text + "\n", encoding="utf-8")
    whole.replace(path)


def _on_one_line(match: re.Match) -> str:
    return f"[{' '.join(match[1].split())}]"


def _rounded(value: Any) -> Any:
    """Floats to 5 significant digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first one flush left, the others flush right."""
    return "\n".join(columns([header, *rows], right=range(1, len(header))))


def quiet_logs() -> None:
    """Leave the terminal to the benchmark: warnings and errors only."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="fairseq")
    logging.getLogger().setLevel(logging.WARNING)


def say(text: str) -> None:
    """One line (or table) for the reader of the terminal, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
