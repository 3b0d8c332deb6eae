"""run_gpu.sh where there is no GPU: a rehearsal of every step, and what it refuses."""

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "run_gpu.sh"
# one of each kind; the other steps differ in sizes
SHAPES = ("meta-1.1t", "dropless-16", "dropless-16-fp16")
STEPS = ["tests-kernels", f"layer-{','.join(SHAPES)}", "train-meta-1.1t-rank", "layer-decode"]


def run_gpu(**environment):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "scripts/bench/run_gpu.sh"], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=580,
    )  # fmt: skip


@pytest.mark.slow
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
    found = {}
    for path in (tmp_path / "results").glob("*.json"):
        result = json.loads(path.read_text())
        assert "complete" not in result
        found[path.stem] = [list(point["ms"]) for point in result["results"].values()]
    alone = ["torch", "experts", "products"]
    want = {f"layer-tiny-{name}-cpu": [alone] for name in SHAPES[1:]}
    want |= {"layer-tiny-meta-1.1t-cpu": [["torch", "dense", "experts", "products"]]}
    decode, train = found.pop("layer-decode-cpu"), found.pop("train-meta-1.1t-rank-cpu")
    assert all("eager" in cases for cases in decode) and len(train) == 3 and found == want


@pytest.mark.parametrize("step", ["layer", "kernels", "products", "train", "swin"])
def test_presets_of_the_script_exist_and_only_training_needs_fairseq(step):
    *_, presets = importlib.import_module(f"bench_{step}").OPTIONS["preset"]
    named = re.findall(rf"^ .*bench \d+ {step} (\S+)", SCRIPT.read_text(encoding="utf-8"), re.M)
    assert set(",".join(named).split(",")) - {"decode"} <= set(presets)
    hide = "import sys; sys.modules.update(dict.fromkeys(['fairseq', 'omegaconf', 'hydra']))"
    code = f"{hide}; import bench_{step} as bench; bench.main(['--tiny', '--help'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True)
    assert (done.returncode == 0) == (step != "train"), done.stderr


def test_refusals():
    done = run_gpu(PART="3")
    assert done.returncode == 2 and done.stderr == "run_gpu.sh: PART=3: 1 or 2\n"
