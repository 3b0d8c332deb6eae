"""Hydra runs with a relative save directory: every rank and every restart means the same one."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch_processes import LAUNCH, REPOSITORY, environment

pytest.importorskip("fairseq")
HYDRA = [sys.executable, "-m", "fairseq_cli.hydra_train"]
TINY = [
    "--config-dir",
    f"{REPOSITORY}/configs",
    "--config-name",
    "tiny_cpu",
    "model.decoder_layers=2",
    "task.dataset_size=200",
    "checkpoint.save_dir=saved",
]


def run(words, folder):
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    return output


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def own_config(folder):
    """The tiny config without what it says of Hydra."""
    text = (Path(REPOSITORY) / "configs" / "tiny_cpu.yaml").read_text()
    (folder / "own.yaml").write_text(text[text.index("common:") :])
    return ["--config-dir", str(folder), "--config-name", "own", *TINY[4:]]


def test_the_same_command_twice_resumes(tmp_path, programs):
    for updates in (2, 4):
        words = ["fairseq-hydra-train", *TINY, f"optimization.max_update={updates}"]
        done = programs.run(words, cwd=tmp_path, timeout=120)
        assert done.status == 0, done.text[-3000:]
    assert "(epoch 1 @ 2 updates)" in done.text
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("config", ["shipped", "own"])
def test_two_launchers_that_start_apart_save_into_one_directory(tmp_path, config):
    words = TINY if config == "shipped" else own_config(tmp_path)
    nodes, port = [], free_port()
    for number in range(2):
        options = [
            "--nnodes",
            "2",
            "--node-rank",
            str(number),
            "--nproc-per-node",
            "1",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
        ]
        nodes.append(
            run([*LAUNCH, *options, "--", *HYDRA, *words, "optimization.max_update=2"], tmp_path)
        )
        time.sleep(2 * (1 - number))
    for node in nodes:
        finish(node)
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {f"checkpoint_last-{part}.pt" for part in ("shared", "rank-0", "rank-1")} <= names
    assert {path.name for path in tmp_path.iterdir()} <= {"saved", "own.yaml"}
