"""AOTInductor packages, run from Python and by the C++ example, without Python there."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_models import VOCABULARY, logits_of, make, sentences

from fairseq_tutel.export import __main__ as command_line
from fairseq_tutel.export import export_layer
from fairseq_tutel.moe import MoELayer

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "cpp"

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The example, built by CMake as its README says."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    folder = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for words in (
        ["-S", EXAMPLE, "-B", folder, prefix, "-DCMAKE_BUILD_TYPE=Release"],
        ["--build", folder],
    ):
        done = subprocess.run(["cmake", *words], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    linked = subprocess.run(["ldd", folder / "run"], capture_output=True, text=True).stdout
    assert "libtorch" in linked and "libpython" not in linked
    return folder / "run"


def run(program, *words, rows=b""):
    """Standard output of a process in whose environment nothing leads to Python."""
    done = subprocess.run(
        [program, *map(str, words)], input=rows, capture_output=True, timeout=60,
        env={"PATH": "/nowhere", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def floats(data, *shape):
    return torch.from_numpy(np.frombuffer(data, np.float32).copy()).view(*shape)


@pytest.mark.timeout(300)
def test_a_language_model_runs_without_python(program, tmp_path, capsys):
    saved = make(tmp_path, "--share-decoder-input-output-embed --moe-shared-expert-ffn-dim 12")
    package = tmp_path / "model.pt2"
    assert command_line.main(["aot", str(saved.path), str(package)]) == 0
    assert capsys.readouterr().out == f"{package}\n"
    compiled = torch._inductor.aoti_load_package(str(package))
    for rows, length in ((3, 8), (1, 1), (1, 7), (5, 2)):
        tokens = sentences(rows, length)
        want = logits_of(saved.model, tokens)
        torch.testing.assert_close(compiled(tokens), want, rtol=1e-6, atol=1e-6)
        if rows == 1:
            found = floats(run(program, package, 0, *tokens[0].tolist()), length, -1)
            torch.testing.assert_close(found, want[0], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found, compiled(tokens)[0], rtol=1e-6, atol=1e-6)

    for rows, length in ((1, 0), (0, 3), (0, 0)):
        empty = torch.zeros(rows, length, dtype=torch.int64)
        assert compiled(empty).shape == (rows, length, VOCABULARY)

    tokens = [2, 9]  # greedily, as far as the model has positions
    for _ in range(5):
        logits = logits_of(saved.model, torch.tensor([tokens]))[0, -1]
        logits[1] = -torch.inf
        tokens.append(logits.argmax().item())
    said = run(program, package, 5, 2, 9).decode().split()
    assert list(map(int, said)) == tokens[2 : 2 + len(said)] and (len(said) == 5 or said[-1] == "2")

    bad = subprocess.run([program, package, "0", "99"], capture_output=True, text=True)
    assert bad.returncode == 2 and "token 99" in bad.stderr


@pytest.mark.timeout(300)
def test_a_layer_runs_without_python(program, tmp_path):
    torch.manual_seed(0)
    layer = MoELayer(16, 5, 24, seed=1, top_k=2).eval()
    export_layer(layer, tmp_path / "layer.pt2")
    for count in (1, 6, 33):
        x = torch.randn(count, 16)
        with torch.no_grad():
            want = layer(x)
        found = floats(run(program, tmp_path / "layer.pt2", rows=x.numpy().tobytes()), count, 16)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
