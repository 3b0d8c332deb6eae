"""A job that gets more experts while it runs, and that is started once more.

Kills at any call of a save: tests/checkpoint/test_checkpoint_kills.py.
"""

import sys

import pytest
import torch
from helpers.commands import ROOT, SMALL_LM, logged, run
from helpers.sets import member

from fairseq_tutel.checkpoint import inspect

pytestmark = pytest.mark.long

_WORDS = f"""
    {ROOT}/tests/golden/data_world2 {SMALL_LM} --task language_modeling --tokens-per-sample 8
    --sample-break-mode none --batch-size 2 --moe-expert-count 2 --moe-grow-at 3:4
    --moe-second-expert-policy all --moe-capacity-factor 0 --dropout 0 --attention-dropout 0
    --lr 0.002 --disable-validation --no-epoch-checkpoints
"""


def _start(folder, *words):
    """Updates that a run made, and what it printed."""
    command = [sys.executable, "-m", "fairseq_tutel.launch", "--nproc-per-node", "2", "--bind"]
    command += ["none", "--", "fairseq-train", *_WORDS.split(), "--save-dir", str(folder), *words]
    text = run(command, timeout=240)
    return [int(row["num_updates"]) for row in logged(text, "train_inner")], text


def test_a_run_grows_by_a_flag_and_goes_on_with_the_experts_that_it_has(tmp_path):
    line = "has 4 experts (--moe-grow-at 3:4): going on with them, not with --moe-expert-count 2"
    whole, again = tmp_path / "whole", tmp_path / "again"
    updates, text = _start(whole, "--max-update", "8")
    assert "--moe-grow-at: saved" in text and "begin again" in text and text.count(line) == 1
    assert updates == list(range(1, 9))
    updates, _ = _start(again, "--max-update", "5")
    assert updates == list(range(1, 6))
    updates, text = _start(again, "--max-update", "8")
    assert updates == [6, 7, 8] and text.count(line) == 1
    sets = [str(folder / "checkpoint_last.pt") for folder in (again, whole)]
    report = inspect(sets[0], verify=True)
    assert report["num_experts"] == 4 and report["consistent"]
    for name in ("shared", "rank-0", "rank-1"):
        mine, theirs = (torch.load(member(s, name), weights_only=False)["model"] for s in sets)
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), (name, key)
