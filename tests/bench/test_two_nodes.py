"""The bed of two nodes, and the benchmark of exchanges on it at a tiny size."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import two_nodes
from helpers.commands import ROOT, environment, run

SCRIPT = [sys.executable, "scripts/bench/two_nodes.py"]


def _why_no_namespaces():
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    words = ["unshare", "--net", "--uts", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"no network namespaces: {done.stderr.strip()}" if done.returncode else None


WHY_NOT = _why_no_namespaces()
needs_namespaces = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.mark.long
@needs_namespaces
def test_exchanges_between_two_nodes(tmp_path):
    run(
        [*SCRIPT, "--ranks", "4", "--rate", "100mbit", "--message-bytes", "20000", "--",
         "sh", "-ec", f"""{sys.executable} scripts/bench/bench_alltoall.py --device cpu \\
           --sizes 4K,1M --algorithms linear,2dh --iterations 1 --repetitions 3 \\
           --output {tmp_path}/alltoall.json
           INIT_METHOD=$INIT_METHOD-again {sys.executable} scripts/bench/bench_exchange.py \\
           overlap wire --degrees 1,2 --hidden-dim 128 --tokens 512 --model-dim 128 \\
           --repetitions 3 --output {tmp_path}"""],
        timeout=150,
    )  # fmt: skip
    path = tmp_path / "alltoall.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["link"], result["world_size"]) == ("messages", 4)
    assert result["command"].startswith("python scripts/bench/two_nodes.py --ranks 4 --rate 100mb")
    rows = {(row["algorithm"], row["bytes"]): row for row in result["results"]}
    assert set(rows) == {(name, size) for name in ("linear", "2dh")
                         for size in (4096, 1 << 20)}  # fmt: skip
    # the ranks found out that they are on two nodes of two
    assert rows["2dh", 4096]["exchange"] == "2dh"
    # 1 MiB crosses the link each way, of which a burst of 256 KiB passes unshaped
    least = ((1 << 20) - (256 << 10)) / (100e6 / 8)
    assert rows["linear", 1 << 20]["seconds"]["min"] > 0.9 * least
    for size, ratios in result["ratios"].items():
        linear, two = (
            statistics.median(rows[name, int(size)]["raw_seconds"]) for name in ("linear", "2dh")
        )
        assert ratios["linear/2dh"] == pytest.approx(linear / two, rel=1e-2)
    _check_wire(json.loads((tmp_path / "exchange-wire-4-messages.json").read_text()))
    _check_overlap(json.loads((tmp_path / "exchange-overlap-4-messages.json").read_text()))


def _check_overlap(result):
    median = {name: seconds["p50"] for name, seconds in result["seconds"].items()}
    of_degrees = {f"{name} {n}" for name in ("layer", "exchange", "together") for n in (1, 2)}
    assert set(median) == {"rest", "experts", *of_degrees}
    assert [row["degree"] for row in result["results"]] == [1, 2]
    for row in result["results"]:
        layer, exchange = median[f"layer {row['degree']}"], median[f"exchange {row['degree']}"]
        # rest is part of all three: taken off two, and left in the layer's
        both = exchange + median["experts"] - median["rest"]
        smaller = min(exchange, median["experts"]) - median["rest"]
        assert row["hidden_share"] * smaller == pytest.approx(both - layer, rel=0.01, abs=1e-4)
        # beside each other are two whole passes: what is neither is in both
        saved = exchange + median["experts"] - median[f"together {row['degree']}"]
        assert row["hidden_together"] * smaller == pytest.approx(saved, rel=0.01, abs=1e-4)
        assert row["speedup"] == pytest.approx(median["layer 1"] / layer, rel=1e-3)
    assert result["results"][0]["hidden_by_schedule"] == 0


def _check_wire(result):
    """Bytes by the interface's own counter: 4 directions, of which half leaves the node."""
    rows = {row["wire"]: row for row in result["results"]}
    assert list(rows) == ["same", "bf16", "fp16", "fp8"]
    ranks_of_a_node, tokens, dim = 2, 512, 128
    payload = 4 * ranks_of_a_node * 2 * tokens * dim * 4 / 2
    assert payload < rows["same"]["link_bytes"] < 1.1 * payload
    for wire, share in (("bf16", 1 / 2), ("fp16", 1 / 2 + 4 / 512), ("fp8", 1 / 4 + 4 / 512)):
        assert rows[wire]["bytes_share"] == pytest.approx(share, abs=0.03)


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended(number):
    bed = subprocess.Popen(
        [*SCRIPT, "--ranks", "2", "--", "sh", "-c", "readlink /proc/self/ns/net; exec sleep 60"],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    spaces = {bed.stdout.readline().strip() for _ in range(2)}
    assert len(spaces) == 2 and os.readlink("/proc/self/ns/net") not in spaces
    bed.send_signal(number)
    assert bed.wait(timeout=60) == (128 + number if number == signal.SIGTERM else -number)
    bed.stdout.close()
    deadline = time.monotonic() + 60
    while spaces & _network_namespaces() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not spaces & _network_namespaces()


def _network_namespaces():
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


@needs_namespaces
def test_the_first_failure_ends_all_ranks():
    program = "import os, time; os.environ['RANK'] == '1' and exit(7); time.sleep(600)"
    assert two_nodes.run(two_nodes.qdisc("400mbit"), 2, [sys.executable, "-c", program]) == 7


def test_without_root_it_says_what_helps(tmp_path, monkeypatch, capsys):
    for tool in ("ip", "tc", "nsenter", "unshare"):
        (tmp_path / tool).write_text("#!/bin/sh\necho Operation not permitted >&2; exit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert two_nodes.main(["--", "true"]) == 2
        error = capsys.readouterr().err
        assert "Operation not permitted" in error and "needs root" in error
        assert error.count("\n") == 1
        monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
        assert two_nodes.main(["--", "true"]) == 2
        assert "ip, tc, unshare, nsenter not found" in capsys.readouterr().err
        assert two_nodes.main(["--ranks", "3", "--", "true"]) == 2
        assert "--ranks 3" in capsys.readouterr().err
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
