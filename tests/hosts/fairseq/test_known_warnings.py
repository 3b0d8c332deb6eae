"""A start of fairseq's programs without warnings that no user can do anything about."""

import os
import re
import subprocess
import sys
import warnings

import pytest
from helpers.commands import ROOT, fairseq_command

from fairseq_tutel.hosts.fairseq import known_warnings

TINY = """
    --user-dir fairseq_tutel --arch transformer_lm_gpt_moe --criterion moe_cross_entropy
    --task dummy_lm --dict-size 28 --dataset-size 8 --tokens-per-sample 8 --batch-size 4 --cpu
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --no-save
    --decoder-attention-heads 2 --moe-expert-count 2 --optimizer adam --lr 0.01 --max-update 2
    --moe-load-log-interval 1 --share-decoder-input-output-embed
"""


@pytest.mark.parametrize("message, category, reason", known_warnings.KNOWN)
def test_other_warnings_are_shown(message, category, reason):
    """A filter takes out its own warning only: one category, one beginning."""
    assert reason and message
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        known_warnings.install()
        warnings.warn("something of the user's", category, stacklevel=1)
    assert len(seen) == 1


def test_they_are_shown_on_request(monkeypatch):
    monkeypatch.setenv(known_warnings.VARIABLE, "1")
    with warnings.catch_warnings():
        before = list(warnings.filters)
        known_warnings.install()
        assert warnings.filters == before


def test_training_starts_without_warnings_and_draws_the_experts_in_tensorboard(tmp_path):
    board = str(tmp_path / "board")
    words = [*TINY.split(), "--save-dir", str(tmp_path), "--tensorboard-logdir", board]
    text = fairseq_command("fairseq-train", words, tmp_path)
    assert "Warning" not in text, [line for line in text.splitlines() if "Warning" in line]
    assert "done training" in text
    said = [line.split(" | ", 3)[-1] for line in text.splitlines() if " | INFO | " in line]
    for _, line, reason in known_warnings.LINES:
        assert reason and not [found for found in said if re.fullmatch(line, found)]
    # what fairseq says of what is shared indeed stays
    assert any(line.startswith("detected shared parameter: ") for line in said)
    folders = {path.parent.name for path in (tmp_path / "board").rglob("*tfevents*")}
    assert folders >= {"train", "expert_load"}
    (events,) = (tmp_path / "board" / "expert_load").glob("*tfevents*")
    data = events.read_bytes()  # names stand in the records as they are
    for name in ("load_over_mean", "largest_load_over_mean", "unused_experts"):
        assert data.count(f"layer_1/{name}".encode()) == 2, name  # one per update


def test_the_launcher_starts_hydra_without_warnings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fairseq_tutel.launch", "--nproc-per-node", "1", "--",
         "fairseq-hydra-train", "--config-name", "tiny_cpu", "optimization.max_update=1",
         "checkpoint.no_save=true"],
        cwd=tmp_path, capture_output=True, text=True, timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warning" not in done.stdout + done.stderr
