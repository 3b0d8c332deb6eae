"""What a result must hold besides its numbers, and how results are written and printed."""

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
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
    """As it can be called from the repository root; where it wrote its results does not matter, nor
    where on the machine folders that it was given are: of an absolute path the name is kept.
    """
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    words = [
        word
        for before, word in zip(sys.argv, sys.argv[1:], strict=False)
        if "--output" not in (before, word)
    ]
    words = [Path(word).name if os.path.isabs(word) else word for word in words]
    command = shlex.join(["python", str(name), *words])
    bed = os.environ.get("TWO_NODES")  # set by two_nodes.py: how it was called
    return f"{bed} -- {command}" if bed else command


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


def goal(text: str, ratio: float, bound: float, at_most: bool = False) -> dict[str, Any]:
    """Whether a ratio reaches its bound from above, or from below."""
    reached = ratio <= bound if at_most else ratio >= bound
    return {"goal": text, "ratio": ratio, "bound": bound, "reached": reached}


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


def table(rows: Iterable[Mapping], shown: Mapping[str, str | Callable[[Any], str]]) -> str:
    """Columns, the first one flush left, the others flush right.

    Args:
        shown: header -> format string for a row's fields (``"{ms[p50]:.2f}"``), or a function of
            the row.
    """
    cells = [
        [how.format(**row) if isinstance(how, str) else how(row) for how in shown.values()]
        for row in rows
    ]
    return "\n".join(columns([list(shown), *cells], right=range(1, len(shown))))


def quiet_logs() -> None:
    """Leave the terminal to the benchmark: warnings and errors only."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="fairseq")
    logging.getLogger().setLevel(logging.WARNING)


def say(text: str) -> None:
    """One line (or table) for the reader of the terminal, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
