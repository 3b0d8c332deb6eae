"""Two nodes on one machine, and the all-to-all between them at a tiny size."""

import json
import shutil
import subprocess
import sys

import pytest
from helpers.commands import ROOT, environment, run

SCRIPT = [sys.executable, "scripts/bench/two_nodes.py"]


def _has_namespaces():
    tools = all(map(shutil.which, ("ip", "tc", "unshare", "nsenter")))
    words = ["unshare", "--net", "--uts", "true"]
    return tools and not subprocess.run(words, capture_output=True, check=False).returncode


needs_namespaces = pytest.mark.skipif(not _has_namespaces(), reason="no network namespaces")
# of fp32's bytes: fp16 and fp8 have a scale per 128 values
_SHARES = {"": 1, " bf16": 1 / 2, " fp16": 1 / 2 + 4 / 512, " fp8": 1 / 4 + 4 / 512}


@pytest.mark.long
@needs_namespaces
def test_exchanges_between_two_nodes(tmp_path):
    path = tmp_path / "alltoall.json"
    run(
        [*SCRIPT, "--ranks", "4", "--rate", "100mbit", "--message-bytes", "20000", "--",
         sys.executable, "scripts/bench/bench_alltoall.py", "--device", "cpu", "--sizes", "4K,1M",
         "--algorithms", "linear,2dh", "--wires", "same,bf16,fp16,fp8", "--iterations", "1",
         "--repetitions", "3", "--output", str(path)],
        timeout=150,
    )  # fmt: skip
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["link"], result["world_size"]) == ("messages", 4)
    assert result["command"].startswith("python scripts/bench/two_nodes.py --ranks 4 --rate 100mb")
    small, large = result["results"].values()
    # the ranks found out that they are on two nodes of two
    assert small["derived"]["2dh"]["uses"] == "2dh"
    # 1 MiB crosses the link each way, of which a burst of 256 KiB passes unshaped
    least = 1e3 * ((1 << 20) - (256 << 10)) / (100e6 / 8)
    assert large["ms"]["linear"]["wall"]["min"] > 0.9 * least
    # bytes by the interface's own counter: half of what two ranks send leaves the node
    for name in ("linear", "2dh"):
        sent = {wire: large["derived"][f"{name}{wire}"]["sent"] for wire in _SHARES}
        assert (1 << 20) < sent[""] < 1.1 * (1 << 20)
        for wire, share in _SHARES.items():
            assert sent[wire] / sent[""] == pytest.approx(share, abs=0.03)


def run_bed(*words, **env):
    """Run two_nodes.py; return its exit status and its error."""
    how = {"cwd": ROOT, "env": environment(**env), "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([*SCRIPT, *words], **how)
    return done.returncode, done.stderr


@needs_namespaces
def test_the_first_failure_ends_all_ranks():
    program = "import os, time; os.environ['RANK'] == '1' and exit(7); time.sleep(600)"
    assert run_bed("--ranks", "2", "--", sys.executable, "-c", program)[0] == 7


def test_without_root_it_says_what_helps(tmp_path):
    for tool in ("ip", "tc", "nsenter"):
        (tmp_path / tool).write_text("#!/bin/sh\necho Operation not permitted >&2; exit 1\n")
        (tmp_path / tool).chmod(0o755)
    status, error = run_bed("--", "true", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert status == 2 and "Operation not permitted" in error and "root, as with sudo" in error
    assert error.count("\n") == 1
    status, error = run_bed("--ranks", "3", "--", "true")
    assert status == 2 and "--ranks 3" in error
