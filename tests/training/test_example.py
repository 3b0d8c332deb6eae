"""scripts/examples/plain_pytorch.py, as its first lines say to start it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "scripts" / "examples" / "plain_pytorch.py"


def run(ranks, steps, checkpoint):
    """Gradient norms by step, as the example prints them."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*start, str(EXAMPLE), "--steps", str(steps), str(checkpoint)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"step (\d+) loss \S+ gradient norm (\S+)", done.stdout)
    return {int(step): float(norm) for step, norm in found}


def test_trains_saves_and_resumes_at_other_numbers_of_ranks(tmp_path):
    text = EXAMPLE.read_text()
    commands = re.findall(r"(?:--nproc-per-node (\d+) )?\S+plain_pytorch.py --steps (\d+)", text)
    assert commands == [("2", "20"), ("4", "40"), ("", "60")]
    norms = {}
    for ranks, steps in commands:
        part = run(int(ranks or 1), int(steps), tmp_path / "run" / "checkpoint_last.pt")
        assert list(part) == list(range(int(steps) - 19, int(steps) + 1))
        norms |= part
    alone = run(1, 60, tmp_path / "alone.pt")
    assert min(alone.values()) > 0.05  # clipping was active in every step
    # a rank's aux loss is of its own tokens, so ranks agree up to its small weight
    assert [norms[step] for step in alone] == pytest.approx(list(alone.values()), rel=2e-2)
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "checkpoint_last-shared.pt",
        "checkpoint_last-rank-0.pt",
    }
