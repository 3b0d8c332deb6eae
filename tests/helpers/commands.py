"""Run fairseq's own commands and read what they log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fairseq_command(
    name: str, arguments: Sequence[str], folder: Path, *, timeout: float = 150.0
) -> str:
    """Run ``fairseq-train`` or another command to its end, in a process of its own.

    Where fairseq comes from a folder on PYTHONPATH there are no console scripts; its modules do.
    (Many commands, and several ranks: helpers/programs.py.)

    Args:
        arguments: after the command's name.
        folder: for the log.
        timeout: seconds.

    Returns:
        What it wrote to stdout and stderr.

    Raises:
        AssertionError: it failed or did not end; the message holds the end of its log.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log = folder / "log.txt"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [*_program(name), *arguments], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        pass  # reported below, with the log
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert process.returncode == 0, f"exit code {process.returncode}\n{text[-3000:]}"
    return text


def _program(name: str) -> list[str]:
    """Console script of this interpreter, or the module that it would call."""
    script = Path(sys.executable).with_name(name)
    if script.exists():
        return [str(script)]
    module = name.removeprefix("fairseq-").replace("-", "_")
    return [sys.executable, "-m", f"fairseq_cli.{module}"]


def logged(text: str, what: str) -> list[dict[str, float]]:
    """Rows of ``--log-format json``, ``what`` = train (end of epoch), train_inner or valid.

    Prefixes of names are taken off; values are numbers.
    """
    rows = []
    for line in re.findall(rf"\| {what} \| (\{{.*\}})", text):
        row = json.loads(line)
        prefix = "valid_" if what == "valid" else "train_"
        rows.append({key.removeprefix(prefix): float(v) for key, v in row.items() if _number(v)})
    return rows


def _number(value) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
