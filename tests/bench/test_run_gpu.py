"""run_gpu.sh where there is no GPU: a rehearsal of every step, and what it refuses."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import claims
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
    assert set(train["results"]) == {"moe", "dense", "flop-matched"}
    decode = results.pop("layer-decode-cpu")
    assert all("eager" in found["ms"] for found in decode["results"].values())
    assert set(results) == {f"layer-tiny-{name}-cpu" for name in SHAPES}
    for name, result in results.items():
        (found,) = result["results"].values()
        dense = ["dense"] if "dropless" not in name else []
        assert list(found["ms"]) == ["torch", *dense, "experts", "products"]
    assert not any("complete" in result for result in (train, decode, *results.values()))


@pytest.mark.parametrize(
    ("row", "program", "preset"),
    [(1, "layer", "blog-8gpu"), (2, "train", "meta-half-rank"), (5, "kernels", "meta-1.1t"),
     (13, "swin", "small-32"), (14, "layer", "meta-1.1t")],
)  # fmt: skip
def test_results_fill_the_column_of_the_claims(row, program, preset, tmp_path):
    """What run_gpu.sh writes, rehearsed here under the name that it has on a GPU."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert re.search(rf"^ +bench \d+ {program} (\S+,)?{re.escape(preset)}(,|\s|$)", text, re.M)
    path = tmp_path / f"{program}-{preset}-h100.json"
    words = ["--preset", preset, "--tiny", "--device", "cpu", "--output", str(path)]
    assert importlib.import_module(f"bench_{program}").main(words) == 0
    claim = claims.CLAIMS[row]
    figures, _, name = claim.on_gpus(tmp_path).partition(" (")
    assert name == f"{path.name})" and claim.number == row
    assert all(float(each.removesuffix(claim.unit)) > 0 for each in figures.split(", "))
    assert claims.CLAIMS[3].on_gpus(tmp_path) == ""


@pytest.mark.parametrize("step", ["layer", "kernels", "swin"])
def test_only_training_needs_fairseq(step):
    hide = "import sys; sys.modules.update(dict.fromkeys(['fairseq', 'omegaconf', 'hydra']))"
    words = ["--tiny", "--device", "cpu", "--help"]
    code = f"{hide}; import bench_{step} as bench; bench.main({words})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts" / "bench", capture_output=True, text=True
    )
    assert done.returncode == 0 and "--device" in done.stdout, done.stderr


@pytest.mark.parametrize("step", ["layer", "kernels", "products", "train", "swin"])
def test_presets_of_the_script_exist(step):
    """The rehearsal leaves some steps out, for its time."""
    *_, presets = importlib.import_module(f"bench_{step}").OPTIONS["preset"]
    text = SCRIPT.read_text(encoding="utf-8")
    named = ",".join(re.findall(rf"^ .*bench \d+ {step} (\S+)", text, re.M)).split(",")
    assert set(named) - {"decode"} <= set(presets)


def test_wheels_that_do_not_fit_stop_nothing(tmp_path):
    """A wheel of another Python is a warning: what needs no fairseq is measured."""
    (tmp_path / "fairseq-0.1-cp27-cp27m-win32.whl").touch()
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "fairseq.py").write_text("raise ImportError", encoding="utf-8")
    done = run_gpu(
        DRY_RUN="1", OUT=str(tmp_path / "out"), ONLY="nothing", WHEELS=str(tmp_path),
        PYTHONPATH=str(tmp_path / "without"),
    )  # fmt: skip
    assert done.returncode == 0
    assert "WARNING: the wheels" in done.stdout and "fairseq cannot be imported" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    """The case under way is written, the step says so, and no other step begins."""
    only = "@(layer-meta*|kernels*)"
    env = {**os.environ, "PYTHON": sys.executable, "DRY_RUN": "1", "PART": "1", "ONLY": only}
    process = subprocess.Popen(
        ["bash", "scripts/bench/run_gpu.sh"], cwd=ROOT, env={**env, "OUT": str(tmp_path)},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
        # what is started with & has SIGINT ignored, and bash cannot trap what was ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("written:"):  # the first of three shapes
            os.killpg(process.pid, signal.SIGINT)
            break
    lines += process.stdout.readlines()
    assert process.wait(timeout=100) == 1, "".join(lines)
    summary = (tmp_path / "summary-cpu-1.txt").read_text().splitlines()
    stopped = [line for line in summary if not line.startswith(" ")]
    assert re.match(r"layer-meta\S+: (INTERRUPTED after|done)", stopped[0]), summary
    assert stopped[1] == "kernels-meta-1.1t: LEFT OUT, interrupted"
    with tarfile.open(tmp_path / "results-1.tar.gz") as archive:
        assert any("tiny-meta-1.1t" in name for name in archive.getnames())


def test_refusals():
    if not torch.cuda.is_available():  # else it would measure for minutes
        done = run_gpu(PART="1")
        assert done.returncode == 2 and "torch sees no GPU" in done.stderr
    done = run_gpu(PART="3")
    assert done.returncode == 2 and done.stderr == "run_gpu.sh: PART=3: 1 or 2\n"


def test_every_gpu_test_is_in_a_part():
    """Those of part 1 that are not slow; the slow ones and the other folders in part 2."""
    script = SCRIPT.read_text(encoding="utf-8")
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
