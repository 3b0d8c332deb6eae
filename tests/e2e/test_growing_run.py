"""A job that gets more experts while it runs, killed while it does, and commands on its sets."""

import signal
import subprocess
import sys

import pytest
import torch
from helpers.commands import ROOT, SMALL_LM, environment, logged
from helpers.sets import member

from fairseq_tutel.checkpoint import inspect

pytestmark = pytest.mark.long

_WORDS = f"""
    {ROOT}/tests/golden/data_world2 {SMALL_LM} --task language_modeling --tokens-per-sample 8
    --sample-break-mode none --batch-size 2 --moe-expert-count 2 --moe-grow-at 3:4
    --moe-second-expert-policy all --moe-capacity-factor 0 --dropout 0 --attention-dropout 0
    --lr 0.002 --max-update 8 --disable-validation --no-epoch-checkpoints
"""
_FILES = ("shared", "rank-0", "rank-1")
# a user dir that kills the process that grows: with its files half written, or committed
_KILLER = """
import os, signal
import fairseq_tutel
from fairseq_tutel.checkpoint import store
from fairseq_tutel.integrations.fairseq.trainer import growth

fairseq_tutel.register()
grow, replace, save_file = growth.grow, os.replace, store.save_file

def killed_while_writing(state, path):
    save_file(state, path)
    if "rank-0" in path:
        os.kill(os.getpid(), signal.SIGKILL)

def killed_while_renaming(source, target):
    replace(source, target)
    if target.endswith("checkpoint_last.pt"):
        os.kill(os.getpid(), signal.SIGKILL)

def sabotaged(*args, **kwargs):
    if os.environ.get("KILL") == "writing":
        store.save_file = killed_while_writing
    if os.environ.get("KILL") == "renaming":
        os.replace = killed_while_renaming
    return grow(*args, **kwargs)

growth.grow = sabotaged
"""


def _start(folder, user_dir, kill=""):
    command = [sys.executable, "-m", "fairseq_tutel.launch", "--nproc-per-node", "2", "--bind"]
    command += ["none", "--", "fairseq-train", *_WORDS.split(), "--user-dir", str(user_dir)]
    return subprocess.run(
        [*command, "--save-dir", str(folder)],
        cwd=ROOT, env={**environment(), "KILL": kill}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip


def _state(folder):
    files = {name: member(folder / "checkpoint_last.pt", name) for name in _FILES}
    return {name: torch.load(file, weights_only=False) for name, file in files.items()}


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    done = _start(folder, ROOT / "fairseq_tutel")
    assert done.returncode == 0, done.stdout[-3000:]
    return folder, done.stdout


def test_a_run_grows_by_a_flag_and_is_killed_meanwhile(grown, tmp_path):
    whole, text = grown
    assert "--moe-grow-at: saved" in text and "begin again" in text
    line = "has 4 experts (--moe-grow-at 3:4): going on with them, not with --moe-expert-count 2"
    assert text.count(line) == 1
    updates = [int(row["num_updates"]) for row in logged(text, "train_inner")]
    assert updates == list(range(1, 9))

    killer, path = tmp_path / "killer", tmp_path / "run" / "checkpoint_last.pt"
    killer.mkdir()
    (killer / "__init__.py").write_text(_KILLER)
    for kill, experts in (("writing", 2), ("renaming", 4)):
        done = _start(path.parent, killer, kill)
        assert done.returncode == 128 + signal.SIGKILL, done.stdout[-3000:]
        report = inspect(str(path), verify=True)
        assert (report["num_experts"], report["num_updates"]) == (experts, 3)
        assert report["consistent"]
    done = _start(path.parent, killer)
    assert done.returncode == 0 and done.stdout.count(line) == 1, done.stdout[-3000:]
    updates = [int(row["num_updates"]) for row in logged(done.stdout, "train_inner")]
    assert updates == list(range(4, 9))
    mine, theirs = _state(path.parent), _state(whole)
    for name, state in theirs.items():
        for key, value in state["model"].items():
            assert torch.equal(mine[name]["model"][key], value), (name, key)
