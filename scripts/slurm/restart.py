"""Rewrite the command of a job that was queued again (train.sbatch).

``python scripts/slurm/restart.py COMMAND ...`` writes the words of COMMAND, each followed by
a NUL. If its last checkpoint exists, the options that choose another start are left out.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_tutel.command_line import EXIT_USAGE, flag_value
from fairseq_tutel.command_line.hydra import find_config, override_name, with_overrides

_SAVE_DIR = "checkpoints"  # fairseq's default
# options that choose a start, with fairseq's defaults
_START = {
    "restore_file": "checkpoint_last.pt",
    "finetune_from_model": "null",
    "reset_dataloader": "false",
    "reset_lr_scheduler": "false",
    "reset_meters": "false",
    "reset_optimizer": "false",
}
_FLAGS = {"--" + key.replace("_", "-"): key for key in _START}
_OVERRIDES = {f"checkpoint.{key}" for key in _START}


def _in_file(words: Sequence[str], key: str) -> Any:
    _, file = find_config(words)
    if file is None:
        return None
    from omegaconf import OmegaConf  # it is where fairseq is
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(OmegaConf.load(file), f"checkpoint.{key}")
    except OmegaConfBaseException as error:
        raise ValueError(f"checkpoint.{key}: {error}; give it in the command") from None


def save_directory(words: Sequence[str]) -> str:
    """Return the command's save dir; ValueError if only Hydra can read it from the config file."""
    given = [w.partition("=")[2] for w in words if override_name(w) == "checkpoint.save_dir"]
    if given:
        return given[-1].strip("'\"")
    return flag_value(words, "--save-dir") or _in_file(words, "save_dir") or _SAVE_DIR


def restarted(words: Sequence[str]) -> list[str]:
    """Return the command for a restart; if it has saved a last checkpoint, it begins there."""
    last = [Path(save_directory(words), f"checkpoint_last{end}.pt") for end in ("", "-shared")]
    if not any(path.exists() for path in last):
        return list(words)
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in _FLAGS:
            skip = not equals and not _FLAGS[name].startswith("reset_")
        elif not (equals and override_name(word) in _OVERRIDES):
            kept.append(word)
    stated = [key for key in _START if _in_file(words, key) is not None]
    return with_overrides(kept, [f"checkpoint.{key}={_START[key]}" for key in stated])


def main(words: Sequence[str]) -> int:
    """Print the command for a restart; exit code 2 if its start cannot be determined."""
    try:
        sys.stdout.write("".join(f"{word}\0" for word in restarted(words)))
    except ValueError as error:
        sys.stderr.write(f"restart: error: {error}\n")
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
