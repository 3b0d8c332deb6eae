"""Run fairseq's own commands, on one or several ranks, and read what they log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fairseq_command(
    name: str, arguments: Sequence[str], folder: Path, *, ranks: int = 1, timeout: float = 150.0
) -> list[str]:
    """Run ``fairseq-train`` or another command to its end.

    Where fairseq comes from a folder on PYTHONPATH there are no console scripts; its modules do.

    Args:
        arguments: after the command's name; the rank's own are added where there are several.
        folder: for the logs and the file through which ranks meet.
        timeout: seconds for all ranks together.

    Returns:
        What each rank wrote to stdout and stderr.

    Raises:
        AssertionError: a rank failed or did not end; the message holds the end of its log.
    """
    program = _program(name)
    logs = [folder / f"log-{rank}.txt" for rank in range(ranks)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank, log in enumerate(logs):
            own = [
                "--distributed-init-method", f"file://{folder}/rendezvous",
                "--distributed-rank", str(rank), "--distributed-world-size", str(ranks),
                "--distributed-no-spawn", "--distributed-backend", "gloo",
            ]  # fmt: skip
            with open(log, "w") as file:
                processes.append(
                    subprocess.Popen(
                        [*program, *arguments, *(own if ranks > 1 else ())],
                        stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
                    )
                )  # fmt: skip
        deadline = time.monotonic() + timeout
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pass  # reported below, with the logs
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, "\n".join(
        f"--- rank {rank}: exit code {code}\n{text[-3000:]}"
        for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
    )
    return texts


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
