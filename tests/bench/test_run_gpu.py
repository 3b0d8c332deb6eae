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
MEMORY = [f"memory-{tokens}" for tokens in (4096, 8192, 16384, 32768)]
# part -> steps that are rehearsed: of part 1 what part 2 does not have in another size
STEPS = {
    "1": ["tests-kernels", "train-meta-1.1t-rank"],
    "2": ["tests-others", "layer-fig14,blog-8gpu,meta-8gpu", "train-meta-half-rank",
          "kernels-fig14", f"layer-{','.join(MEMORY)}", "figures"],
}  # fmt: skip
LAYER = ["fig14", "blog-8gpu", "meta-8gpu", *MEMORY]


def run_gpu(**environment):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "scripts/bench/run_gpu.sh"], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=580,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute of work, but in processes that all import torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("part", STEPS)
def test_rehearsal(part, tmp_path):
    """No step fails for a reason that has nothing to do with a GPU."""
    only = "@(tests|train)-*" if part == "1" else "*"
    done = run_gpu(DRY_RUN="1", PART=part, OUT=str(tmp_path), ONLY=only)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = (tmp_path / f"summary-cpu-{part}.txt").read_text().splitlines()
    steps = [line.split(": done")[0] for line in summary if not line.startswith(" ")]
    assert steps == STEPS[part]
    with tarfile.open(tmp_path / f"results-{part}.tar.gz") as archive:
        archive.extractall(tmp_path / "results", filter="data")
    results = {path.stem: json.loads(path.read_text())
               for path in (tmp_path / "results").glob("*.json")}  # fmt: skip
    train = "meta-half-rank" if part == "2" else "meta-1.1t-rank"
    layers = {f"layer-tiny-{name}-cpu" for name in LAYER} if part == "2" else set()
    kernels = {"kernels-fig14-cpu"} if part == "2" else set()
    assert results.keys() == layers | kernels | {f"train-{train}-cpu"}
    assert not any("complete" in result for result in results.values())
    for name in layers:
        assert list(results[name]["results"]) == ["dense", "torch", "experts", "products"]
    # the bars of the end-to-end figure
    assert set(results[f"train-{train}-cpu"]["results"]) == {"moe", "dense", "flop-matched"}
    if part == "2":
        figure = tmp_path / "results" / "figures-cpu" / "end_to_end.png"
        assert figure.stat().st_size > 10_000


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
