"""Every kernel compiles ahead of time for every target, without a GPU, with 64-bit addresses."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("aot_compile.py")
# Kernels whose whole work is moving rows of 16-bit numbers: they must use 128-bit accesses.
ELEMENTWISE = ("_bias_act_fwd_kernel", "_bias_act_bwd_dh_kernel")
PRODUCTS = ("_rows_product_kernel", "_weight_gradient_kernel")
# Kernels that only GPUs with TMA have, the bytes of shared memory that these have, and the products
# in a tile's loop: a tile of 16 rows is below the size of Hopper's own.
TMA = ("_rows_product_tma_kernel", "_weight_gradient_tma_kernel")
TMA_TARGETS, TMA_SHARED = ("cuda:90", "cuda:100"), 227 * 1024
# Bytes of shared memory that a program may have: A100; MI200 and MI300.
SHARED = {"cuda": 163 * 1024, "hip": 64 * 1024}
MOVERS = ("_token_to_rows_kernel", "_rows_to_token_kernel", *ELEMENTWISE)


def kernel_names():
    names = set()
    for path in (ROOT / "fairseq_tutel" / "backends" / "triton").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names.add(node.name)
    return names


def compiled(*targets):
    """Return the script's output after the checks that hold for every kernel."""
    # This process may run the interpreter, whose kernels do not compile.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *targets],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    for result in results:
        assert result["size"] > 1000, result
        assert result["narrow"] == [], result
        if result["kernel"] in ELEMENTWISE:  # the loop over rows, and none per element
            assert result.get("branches", 0) <= 2, result
        if result["kernel"] in TMA:
            assert result["tma"] > 0 and result["shared"] <= TMA_SHARED, result
            assert result["registers"] <= 255, result
            # Blackwell's compiler puts a few registers aside, more of one of two programs
            aside = 8 if result["given"]["FLATTEN"] else 48
            aside *= result["target"] == "cuda:100"
            assert result["stack"] <= aside, result
            assert result["products"] > 0 or result["warps"] == 4, result
            check_pipeline(result)
        elif result["tile"] == 0:  # others are left out by the tuning where they do not fit
            assert result["shared"] <= SHARED[result["target"].split(":")[0]], result
        if result["target"].startswith("cuda"):  # of the gating and a tile of the products 8 bytes
            assert result["local"] == 0, result
            assert result["stack"] <= 8 or result["kernel"] in TMA, result
            assert 0 < result["registers"] <= 255, result
        else:
            assert result["spilled"] == 0 and 0 < result["registers"] <= 512, result
        if result["kernel"] in MOVERS:
            assert result.get("wide", 1) > 0, result
    return results


def check_pipeline(result):
    """Loads stay under way while Hopper's products of many rows run, also from tile to tile."""
    given = result["given"]
    if result["target"] != "cuda:90" or given["BLOCK_R"] < 128:
        return
    is_gradient = result["kernel"] == "_weight_gradient_tma_kernel"
    if "source_ptr" not in given:  # gathered: by cp.async
        assert result["pending"] >= (2 if is_gradient else 1), result
    if "source_ptr" in given or not is_gradient:  # which reads rows' tokens from shared memory
        assert result["detours"] == 0, result
    if not given["FLATTEN"]:  # two programs share the registers and the shared memory
        assert result["registers"] <= 128 and 2 * result["shared"] <= TMA_SHARED, result
    elif not is_gradient:
        assert result["loops"] == 1, result


def test_another_number_of_experts_compiles_nothing():
    """Ranks that help have more experts from step to step, and all ranks would wait."""
    for path in (ROOT / "fairseq_tutel" / "backends" / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.arg == "e":
                assert node.annotation is None, (path.name, node.lineno)


# Every dtype and tile on one NVIDIA and one AMD target, one variant of each kernel on the others.
LONG = "cuda:90:all", "hip:gfx942:all", "hip:gfx90a:one"
LATER = [pytest.param(target, marks=pytest.mark.long) for target in LONG]
TARGETS = ("cuda:80:one", "cuda:100:one", *LATER)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target):
    without = () if target.rpartition(":")[0] in TMA_TARGETS else TMA
    assert {result["kernel"] for result in compiled(target)} == kernel_names() - set(without)


@pytest.mark.long
@pytest.mark.parametrize("target", ["cuda:90:tiles", "hip:gfx942:tiles"])
def test_every_tile_compiles(target):
    found = {(result["kernel"], result["tile"]) for result in compiled(target)}
    assert {name for name, _ in found} == {*MOVERS, *PRODUCTS}
    for name in (*MOVERS, *PRODUCTS):
        tiles = sorted(tile for kernel, tile in found if kernel == name)
        assert tiles == list(range(1, len(tiles) + 1)) and len(tiles) > 3
