"""The quickstart that compares a dense model with one with experts, for a few updates."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["--speech", "--bart"])
def test_both_models_are_trained_and_compared(recipe, tmp_path):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    program = [sys.executable, str(ROOT / "scripts" / "quickstart" / "main.py"), recipe]
    done = subprocess.run(
        [*program, "--updates", "12", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    rows = re.findall(r"^(dense|moe) +([\d.]+)   \(seeds 1 to 1: ", done.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["dense", "moe"]
    written = re.findall(r"^      model: ", done.stdout, re.MULTILINE)
    assert len(written) == (3 if recipe == "--speech" else 0)
