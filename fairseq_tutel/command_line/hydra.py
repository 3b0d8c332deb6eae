"""Words of Hydra's commands: overrides, and the primary config file."""

import re
from collections.abc import Sequence
from pathlib import Path

from . import CONFIGS, config_directory, flag_value, with_extension

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


def find_config(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the words and the primary config file, None if only Hydra can find one.

    The words get the folder of the shipped configs if they name one of these and no folder.
    ValueError is raised for a missing folder or file.
    """
    name = flag_value(words, "--config-name", "-cn")
    given = flag_value(words, "--config-dir", "-cd")
    folder, words = given or flag_value(words, "--config-path", "-cp"), list(words)
    if given and "://" not in given and not Path(given).is_dir():
        raise ValueError(f"--config-dir {given}: there is no such folder")
    if name is None:
        return words, None
    file = with_extension(name)
    if folder is None and (CONFIGS / file).is_file():
        # fairseq's own folder, which Hydra would look in, has no config of such a name
        folder = str(config_directory(file))
        words = ["--config-dir", folder, *words]
    path = Path(folder or CONFIGS) / file
    if path.is_file():
        return words, path
    # fairseq's own folder has a config of the name config
    if name == "config" or folder != given or "://" in (given or ""):
        return words, None
    found = ", ".join(sorted(each.stem for each in path.parent.glob("*.y*ml"))) or "none"
    raise ValueError(f"--config-name {name}: no such file in {path.parent} (there are: {found})")
