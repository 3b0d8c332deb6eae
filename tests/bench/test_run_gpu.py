"""run_gpu.sh where there is no GPU: a rehearsal of every step, and what it refuses."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# one of each kind; the other steps differ in sizes
SHAPES = "fig14,blog-8gpu,meta-8gpu"
STEPS = ["tests-kernels", "train-meta-1.1t-rank", f"predicted-{SHAPES}", f"layer-{SHAPES}"]


def run_gpu(**environment):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "scripts/bench/run_gpu.sh"], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=580,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)  # half a minute of work, but in processes that all import torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_rehearsal(tmp_path):
    """No step fails for a reason that has nothing to do with a GPU."""
    done = run_gpu(DRY_RUN="1", OUT=str(tmp_path), ONLY=f"@({'|'.join(STEPS)})")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = (tmp_path / "summary-cpu.txt").read_text().splitlines()
    assert [line.split(": done")[0] for line in summary if not line.startswith(" ")] == STEPS
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        archive.extractall(tmp_path / "results", filter="data")
    results = {path.stem: json.loads(path.read_text())
               for path in (tmp_path / "results").glob("*.json")}  # fmt: skip
    train = results.pop("train-meta-1.1t-rank-cpu")
    predicted = results.pop("predicted-fig14-cpu")["results"]["blog-8gpu"]["predicted"]
    assert set(predicted) == {"a100-80g", "h100", "h200"}  # of all, where the GPU is none of them
    assert set(train["results"]) == {"moe", "dense", "flop-matched"}
    assert set(results) == {
        f"layer-tiny-{name}-cpu" for name in ("fig14", "blog-8gpu", "meta-8gpu")
    }
    for result in results.values():
        assert list(result["results"]) == ["dense", "torch", "experts", "products"]
    assert not any("complete" in result for result in (train, *results.values()))


def test_refusals():
    if not torch.cuda.is_available():  # else it would measure for minutes
        done = run_gpu(PART="1")
        assert done.returncode == 2 and "torch sees no GPU" in done.stderr
    done = run_gpu(PART="3")
    assert done.returncode == 2 and done.stderr == "run_gpu.sh: PART=3: 1 or 2\n"


def test_every_gpu_test_is_in_a_part():
    """Those of part 1 that are not slow; the slow ones and the other folders in part 2."""
    script = (ROOT / "scripts" / "bench" / "run_gpu.sh").read_text(encoding="utf-8")
    one, two = re.findall(r"^ +gpu_tests (?:[^\n]*\\\n)*[^\n]*", script, re.MULTILINE)
    assert '"gpu and not slow"' in one and "-m gpu " in two
    paths = {name: re.findall(r"tests/\S+", step) for name, step in (("one", one), ("two", two))}
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "mark.gpu" not in text or path.name in ("conftest.py", Path(__file__).name):
            continue
        where = "two" if "mark.slow" in text else "one"
        name = str(path.relative_to(ROOT))
        found = any(name.startswith(start) for start in paths[where])
        assert found or (where == "one" and name.startswith(tuple(paths["two"]))), name
