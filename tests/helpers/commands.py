"""Run commands in processes of their own and read what fairseq logs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# a language model of two small layers, the second sparse, on a CPU
SMALL_LM = f"""
    --user-dir {ROOT}/fairseq_tutel --cpu --arch transformer_lm_gpt_moe --decoder-layers 2
    --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
    --criterion moe_cross_entropy --optimizer adam --num-workers 0
    --required-batch-size-multiple 1 --log-format json --log-interval 1
"""
PAGES = sorted(
    path
    for folder in ("", "configs/**/", "fairseq_tutel/**/", "scripts/**/", "tests/**/")
    for path in ROOT.glob(f"{folder}*.md")
    if path.resolve() == path  # fairseq_tutel/configs is a link
)


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**extra: str) -> dict[str, str]:
    """One thread per process, and this repository first on the path."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}


def run(command: Sequence[str], *, cwd: Path = ROOT, timeout: float = 200.0) -> str:
    """Output (both streams) of a command that succeeds."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": cwd}
    done = subprocess.run(command, env=environment(), timeout=timeout, **how)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


def fairseq_command(name: str, arguments: Sequence[str], *, timeout: float = 150.0) -> str:
    """Output of ``fairseq-train`` or another command that succeeds, in a process of its own.

    Where fairseq comes from a folder on PYTHONPATH there are no console scripts; its modules do.
    """
    script = Path(sys.executable).with_name(name)
    module = name.removeprefix("fairseq-").replace("-", "_")
    program = [str(script)] if script.exists() else [sys.executable, "-m", f"fairseq_cli.{module}"]
    return run([*program, *arguments], timeout=timeout)


def logged(text: str, what: str) -> list[dict[str, float]]:
    """Numbers of ``--log-format json`` by plain name; ``what``: train, train_inner, valid, test."""
    rows = []
    for line in re.findall(rf'\b{what}(?: \||\]\[INFO\] -) (\{{".*\}})', text):
        rows.append({})
        for key, value in json.loads(line).items():
            with contextlib.suppress(ValueError, TypeError):  # a word, or null
                rows[-1][key.removeprefix(f"{what.partition('_')[0]}_")] = float(value)
    return rows


def executable(path: Path, text: str) -> str:
    """A program with this text."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def variables(text: str) -> dict[str, str]:
    """Variables by name; a tilde stands for a blank in a value."""
    return dict(word.replace("~", " ").split("=", 1) for word in text.split())
