"""Reads and completes a fairseq-hydra-train command: its words and its config file.

Only Hydra can compose a configuration; this finds plain values in the primary file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..shipped_configs import CONFIGS, config_directory, with_extension

# Where the command itself runs, as fairseq's own config.yaml has it, and no files of Hydra's.
# Hydra's default is a new folder for every process, named after the second it started in: no rank
# then finds another's checkpoints under a relative save_dir, nor its own of the last run.
STAY_HERE = {
    "hydra.run.dir": "hydra.run.dir=.",
    "hydra.output_subdir": "hydra.output_subdir=null",
    "hydra/job_logging": "hydra.job_logging.handlers.file.filename=/dev/null",
}
# fairseq of 2022 under Hydra 1.3 prints these at every start, in every rank, before it reads a
# config; later warnings of the kind are left out by hosts/fairseq/known_warnings.py.
_WARNERS = ("fairseq_cli.hydra_train", "hydra.main", "hydra._internal.hydra", "sys")
_FAIRSEQS = "config"  # the config in fairseq's own folder, where Hydra looks, too
_OVERRIDE = re.compile(r"^[+~]*[A-Za-z_][\w.@/]*=")
_CHOOSE_DIRECTORY = ("hydra.run.dir", "hydra.job.chdir")


def quiet_start(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that leave out what Hydra warns of before fairseq has read a config, nothing where
    the user chose what Python warns of (or ``FAIRSEQ_TUTEL_WARNINGS=1``)."""
    if "PYTHONWARNINGS" in env or env.get("FAIRSEQ_TUTEL_WARNINGS", "0") not in ("", "0"):
        return {}
    return {"PYTHONWARNINGS": ",".join(f"ignore::UserWarning:{name}" for name in _WARNERS)}


def flag_value(words: Sequence[str], *flags: str) -> str | None:
    """The last value of any of ``flags`` among a command's words, as ``--flag value`` or ``=``."""
    value = None
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in flags and equals:
            value = text
        elif word in flags and i + 1 < len(words):
            value = words[i + 1]
    return value


def override_name(word: str) -> str:
    """``model.x`` of ``+model.x=1``; the word itself where it is no override."""
    return word.partition("=")[0].lstrip("+")


def with_overrides(words: Sequence[str], added: Sequence[str]) -> list[str]:
    """``words`` with ``added`` behind the last override.

    Hydra's parser takes the overrides as one block: words after a flag would be refused.
    """
    last = max(
        (
            i
            for i, w in enumerate(words)
            if _OVERRIDE.match(w) and not (i and words[i - 1].startswith("--"))
        ),
        default=len(words) - 1,
    )
    return [*words[: last + 1], *added, *words[last + 1 :]]


def config_file(words: Sequence[str]) -> Path | None:
    """The primary config file that the words name, None unless it is there."""
    folder = flag_value(words, "--config-dir", "-cd", "--config-path", "-cp")
    name = flag_value(words, "--config-name", "-cn")
    if folder is None or name is None:
        return None
    path = Path(folder) / with_extension(name)
    return path if path.is_file() else None


def check_config(words: Sequence[str]) -> None:
    """Refuse a config that is not there, in words that name it; Hydra's own do not always.

    Raises ValueError. Folders that only Hydra can resolve (pkg://) are left to it.
    """
    name = flag_value(words, "--config-name", "-cn")
    given = flag_value(words, "--config-dir", "-cd")
    if given is not None and "://" not in given and not Path(given).is_dir():
        raise ValueError(f"--config-dir {given}: there is no such folder")
    moved = flag_value(words, "--config-path", "-cp") is not None
    if name in (None, _FAIRSEQS) or moved or "://" in (given or "") or config_file(words):
        return
    folder = CONFIGS if given is None else Path(given)
    found = ", ".join(sorted(path.stem for path in folder.glob("*.y*ml"))) or "none"
    raise ValueError(f"--config-name {name}: no such file in {folder} (there are: {found})")


def with_shipped_configs(words: Sequence[str]) -> list[str]:
    """``--config-dir`` of the shipped configs added where the user names one of them and no folder.

    fairseq's own folder, which Hydra would look in, has no config of such a name.
    """
    name = flag_value(words, "--config-name", "-cn")
    folder = flag_value(words, "--config-dir", "-cd", "--config-path", "-cp")
    if name is None or folder is not None or not (CONFIGS / with_extension(name)).is_file():
        return list(words)
    return ["--config-dir", str(config_directory(with_extension(name))), *words]


def value_in_file(path: Path, section: str, key: str) -> str | None:
    """What the file states for ``key``, at any depth, under the top-level ``section``."""
    lines = rf"^{section}:[ \t]*\n(?:(?:[ \t#].*)?\n)*?"
    match = re.search(rf"{lines}[ \t]+{key}:[ \t]*([^\s#]+)", path.read_text(), re.MULTILINE)
    return match[1].strip("'\"") if match else None


def working_directory(words: Sequence[str]) -> list[str]:
    """Overrides that keep the command in the directory it was called in; none where the user's
    overrides or config file choose one, or a sweep gives every job its own."""
    given = {override_name(word) for word in words if "=" in word}
    path = config_file(words)
    if given & set(_CHOOSE_DIRECTORY) or {"-m", "--multirun"} & set(words):
        return []
    if path is not None and any(value_in_file(path, "hydra", key) for key in ("dir", "chdir")):
        return []
    own_logging = path is not None and re.search(
        r"^\s+-\s+(?:override\s+)?/?hydra/job_logging\s*:", path.read_text(), re.MULTILINE
    )
    return [
        override
        for name, override in STAY_HERE.items()
        if name not in given and not (own_logging and "job_logging" in name)
    ]
