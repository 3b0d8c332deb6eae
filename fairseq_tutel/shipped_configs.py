"""Where the Hydra configs and hardware profiles are, in a checkout and where pip installed them.

``configs`` in this package is a link to the repository's folder; an installed package holds the
files themselves. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parent / "configs"


def config_directory(file: str) -> Path:
    """The folder in which a program finds ``file`` where the user names no folder.

    ``configs`` in the working directory, where it holds that file (a copy that the user changed),
    else the shipped ones.

    Args:
        file: relative to the folder, such as ``meta_1.1t.yaml`` or ``hardware/h100.yaml``.
    """
    here = Path("configs")
    return here if (here / file).is_file() else CONFIGS


def with_extension(name: str) -> str:
    """``NAME.yaml`` of a config's name, with or without its extension."""
    return name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
