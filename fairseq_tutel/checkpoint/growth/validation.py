"""Validation loss of a checkpoint, measured by ``fairseq-eval-lm`` in another process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ..layout import CheckpointError
from ..reader import read_set
from ..state import options_of

_PACKAGE = Path(__file__).resolve().parents[2]


def validation_loss(path: str, data: str, subset: str = "valid") -> float:
    """Return the loss of a language model in bits per token, as ``fairseq-eval-lm`` reports it.

    Blocks are as long as in training.

    Raises:
        CheckpointError: the model translates, or the program fails; with its last line.
    """
    shared = read_set(path).shared
    if "encoder_layers" in options_of(shared):
        raise CheckpointError(
            f"{path}: --data is for language models, which fairseq-eval-lm evaluates; compare "
            "translations by fairseq-validate, before and after"
        )
    length = options_of(shared, "task").get("tokens_per_sample")
    command = [sys.executable, "-m", "fairseq_cli.eval_lm", data, "--user-dir", str(_PACKAGE)]
    command += ["--path", path, "--gen-subset", subset]
    command += ["--tokens-per-sample", str(length)] if length else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"Loss \(base 2\): ([\d.]+)", done.stdout + done.stderr)
    if done.returncode or not found:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise CheckpointError(f"{path}: fairseq-eval-lm {data}: {lines[-1]}")
    return float(found[-1])
