"""Hydra runs with a relative save directory: every rank and every restart means the same one."""

import subprocess
import sys

import pytest
from helpers.programs import ROOT
from launch_helpers import environment, start_nodes

pytest.importorskip("fairseq")
HYDRA = [sys.executable, "-m", "fairseq_cli.hydra_train"]
CHANGES = ["model.decoder_layers=2", "task.dataset_size=200", "checkpoint.save_dir=saved"]
TINY = ["--config-dir", f"{ROOT}/configs", "--config-name", "tiny_cpu", *CHANGES]


def test_the_same_command_twice_resumes(tmp_path, programs):
    for updates in (2, 4):
        words = ["fairseq-hydra-train", *TINY, f"optimization.max_update={updates}"]
        done = programs.run(words, cwd=tmp_path, timeout=120)
        assert done.status == 0, done.text[-3000:]
    assert "(epoch 1 @ 2 updates)" in done.text
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_two_launchers_that_start_apart_save_into_one_directory(tmp_path, port):
    """Of a config that tells Hydra nothing. (Of a shipped one: test_log_filters.py.)"""
    text = (ROOT / "configs" / "tiny_cpu.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text[text.index("common:") :])
    words = ["--config-dir", str(tmp_path), "--config-name", "own", *CHANGES]
    words = ["--", *HYDRA, *words, "optimization.max_update=2"]
    how = {"cwd": tmp_path, "env": environment(OMP_NUM_THREADS="1"), "stderr": subprocess.STDOUT}
    words = ["--nproc-per-node", "1", *words]
    for node in start_nodes(port, words, words, pause=2, **how):
        output, _ = node.communicate(timeout=120)
        assert node.returncode == 0, output[-3000:]
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {f"checkpoint_last-{part}.pt" for part in ("shared", "rank-0", "rank-1")} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "own.yaml"}
