"""Read and complete a fairseq-hydra-train command: its words and its config file.

Only Hydra can compose a configuration; this finds plain values in the primary file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..command_line import CONFIGS, config_directory, flag_value, with_extension

# Run where the command was called, as with fairseq's own config.yaml. Hydra's default is a new
# folder for every process: no rank would find checkpoints under a relative save_dir.
STAY_HERE = {
    "hydra.run.dir": "hydra.run.dir=.",
    "hydra.output_subdir": "hydra.output_subdir=null",
    "hydra/job_logging": "hydra.job_logging.handlers.file.filename=/dev/null",
}
_FAIRSEQS = "config"  # the config in fairseq's own folder, where Hydra looks, too
_OVERRIDE = re.compile(r"^[+~]*[A-Za-z_][\w.@/]*=")


def override_name(word: str) -> str:
    """Return ``model.x`` of ``+model.x=1``; the word itself if it is no override."""
    return word.partition("=")[0].lstrip("+")


def with_overrides(words: Sequence[str], added: Sequence[str]) -> list[str]:
    """Return ``words`` with ``added`` behind the last override: Hydra takes one block of them."""
    before = ("", *words)
    found = [i for i, w in enumerate(words) if _OVERRIDE.match(w) and before[i][:2] != "--"]
    end = found[-1] + 1 if found else len(words)
    return [*words[:end], *added, *words[end:]]


def find_config(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words and what the primary config file states, {} if only Hydra can find it.

    The words get the folder of the shipped configs if they name one of these and no folder.
    ValueError is raised for a missing folder or file.
    """
    name = flag_value(words, "--config-name", "-cn")
    given = flag_value(words, "--config-dir", "-cd")
    folder = given or flag_value(words, "--config-path", "-cp")
    if given and "://" not in given and not Path(given).is_dir():
        raise ValueError(f"--config-dir {given}: there is no such folder")
    if name is None:
        return list(words), {}
    if folder is None and (CONFIGS / with_extension(name)).is_file():
        # fairseq's own folder, which Hydra would look in, has no config of such a name
        folder = str(config_directory(with_extension(name)))
        words = ["--config-dir", folder, *words]
    path = Path(folder or CONFIGS) / with_extension(name)
    if path.is_file():
        import yaml  # it is where Hydra is; other commands do without

        try:
            return list(words), yaml.safe_load(path.read_text()) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if name == _FAIRSEQS or folder != given or "://" in (given or ""):
        return list(words), {}
    found = ", ".join(sorted(each.stem for each in path.parent.glob("*.y*ml"))) or "none"
    raise ValueError(f"--config-name {name}: no such file in {path.parent} (there are: {found})")


def value_in(config: Mapping[str, Any], *keys: str) -> str | None:
    """Return what a file states for nested ``keys``, spelled as in an override; None if nothing."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else str(value)


def working_directory(words: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Return overrides that keep the command in its directory, unless the user chooses another."""
    given = {override_name(word) for word in words if "=" in word}
    chosen = [key for key in ("run.dir", "job.chdir") if value_in(config, "hydra", *key.split("."))]
    if chosen or given & {"hydra.run.dir", "hydra.job.chdir"} or {"-m", "--multirun"} & set(words):
        return []
    own_logging = "hydra/job_logging" in str(config.get("defaults"))
    return [
        override
        for name, override in STAY_HERE.items()
        if name not in given and not (own_logging and "job_logging" in name)
    ]
