"""run_gpu.sh where there is no GPU: a rehearsal of every step, and what it refuses."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LAYER = {"meta-1.1t", "fig14", "blog-8gpu", "meta-8gpu",
         *(f"memory-{tokens}" for tokens in (4096, 8192, 16384, 32768))}  # fmt: skip
STEPS = {"tests-kernels", "layer-meta-1.1t", "kernels-meta-1.1t", "train-meta-1.1t-rank",
         "tests-others", "layer-fig14,blog-8gpu,meta-8gpu", "train-meta-8gpu-rank", "kernels-fig14",
         "layer-memory-4096,memory-8192,memory-16384,memory-32768", "figures"}  # fmt: skip


def run_gpu(**environment):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "scripts/bench/run_gpu.sh"], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=580,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute of work, but in ten processes that all import torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_rehearsal(tmp_path):
    """No step fails for a reason that has nothing to do with a GPU."""
    done = run_gpu(DRY_RUN="1", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = (tmp_path / "summary-cpu.txt").read_text().splitlines()
    assert {line.split(": done")[0] for line in summary if not line.startswith(" ")} == STEPS
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        archive.extractall(tmp_path / "results", filter="data")
    results = {path.stem: json.loads(path.read_text())
               for path in (tmp_path / "results").glob("*.json")}  # fmt: skip
    assert results.keys() == {
        *(f"layer-tiny-{name}-cpu" for name in LAYER), "kernels-meta-1.1t-cpu",
        "kernels-fig14-cpu", "train-meta-1.1t-rank-cpu", "train-meta-8gpu-rank-cpu",
    }  # fmt: skip
    assert not any("complete" in result for result in results.values())
    for name in LAYER:
        cases = results[f"layer-tiny-{name}-cpu"]["results"]
        assert list(cases) == ["dense", "torch", "experts", "products"]
    for name in ("meta-1.1t-rank", "meta-8gpu-rank"):
        variants = results[f"train-{name}-cpu"]["results"]
        assert set(variants) == {"moe", "dense", "flop-matched"}
    bars = (tmp_path / "results" / "figures-cpu" / "end_to_end.png").stat().st_size
    assert bars > 10_000


def test_refusals():
    if not torch.cuda.is_available():  # else it would measure for minutes
        done = run_gpu(PART="1")
        assert done.returncode == 2 and "torch sees no GPU" in done.stderr
    done = run_gpu(PART="3")
    assert done.returncode == 2 and done.stderr == "run_gpu.sh: PART=3: 1 or 2\n"


def test_each_part_ends_before_it_is_stopped():
    """Even if every step takes all that it may, but for what starts in the last seconds."""
    script = (ROOT / "scripts" / "bench" / "run_gpu.sh").read_text(encoding="utf-8")
    for part in ("part_1", "part_2"):
        body = script.split(f"{part}() {{")[1].split("\n}")[0].replace("\\\n", " ")
        limits = []
        for words in map(str.split, body.strip().splitlines()):
            if words[0] in ("bench", "gpu_tests", "step"):
                limits.append(int(words[1 if words[0] == "bench" else 2]))
        assert sum(limits) <= 500 < 540, limits
