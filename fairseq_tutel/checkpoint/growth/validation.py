"""The validation loss of a checkpoint, by ``fairseq-eval-lm`` as a process of its own."""

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
    """Loss in bits per token of a language model, as ``fairseq-eval-lm`` reports it.

    Blocks are those of training. Raises CheckpointError where the model translates, or the program
    fails, with its last line.
    """
    shared = read_set(path, foreign_optimizer=True).shared
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
