"""A config with its overrides, composed as fairseq-hydra-train composes it: by Hydra, over the
schema of fairseq, with the defaults of the registered model, task, criterion and optimizer.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path

from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults, hydra_init
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ..shipped_configs import with_extension

try:
    from hydra import compose, initialize_config_dir
except ImportError:  # Hydra 1.0, of official fairseq 0.12.2
    from hydra.experimental import compose, initialize_config_dir

ARCH = "transformer_lm_gpt_moe"
# Keys of the command line that are the planner's own.
PLAN_KEYS = (
    "gpus",
    "hardware",
    "vocabulary",
    "exchange",
    "overlap",
    "wire",
    "placement",
    "r",
    "formulation",
    "ddp",
)


def load_config(directory: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    """The YAML file ``name`` of ``directory`` with Hydra's ``key=value`` overrides.

    Raises:
        ValueError: there is no such file; Hydra refuses an override; or nothing reads its key.
    """
    if not (directory / with_extension(name)).is_file():
        known = ", ".join(sorted(p.stem for p in directory.glob("*.yaml"))) or "none"
        raise ValueError(f"no config {name!r} in {directory} (there are: {known})")
    name = with_extension(name).removesuffix(".yaml")
    config = _compose(directory.resolve(), name, overrides)
    if config.model._name != ARCH:
        raise ValueError(f"model._name is {config.model._name!r}: the planner supports {ARCH} only")
    unread = _added_to_schema(config)
    try:
        add_defaults(config)
    except OmegaConfBaseException as error:  # a key that the part's dataclass does not have
        key = str(getattr(error, "key", error))
        given = [_key(override) for override in overrides]
        unread.append(next((full for full in given if full.endswith(f".{key}")), key))
    if unread:
        hint = _did_you_mean(directory.resolve(), name, unread[0])
        raise ValueError(f"nothing reads {unread[0]}{hint}")
    return config


def _added_to_schema(config: DictConfig) -> list[str]:
    """Keys that + has put into sections whose keys are all fairseq's."""
    typed = {name: field.type for name, field in FairseqConfig.__dataclass_fields__.items()}
    return [
        f"{section}.{key}"
        for section, values in config.items()
        if isinstance(values, DictConfig) and hasattr(typed.get(section), "__dataclass_fields__")
        for key in values
        if key not in typed[section].__dataclass_fields__
    ]


def _compose(directory: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    hydra_init(name)
    with warnings.catch_warnings():
        # fairseq relies on what Hydra 1.1 deprecated; Hydra 1.0 prints what its parts warn of
        warnings.simplefilter("ignore")
        try:
            with initialize_config_dir(str(directory), **_version()):
                return compose(config_name=name, overrides=list(overrides))
        except HydraException as error:
            reason = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    refused = [_key(override) for override in overrides if _is_named(override, reason)]
    hint = _did_you_mean(directory, name, refused[0]) if refused else ""
    raise ValueError(f"{reason}{hint}")


def _version() -> dict:
    """The argument that Hydra 1.1 and newer want, so as not to warn; 1.0 does not have it."""
    import hydra

    return {} if hydra.__version__.startswith("1.0") else {"version_base": "1.1"}


def _is_named(override: str, reason: str) -> bool:
    """Whether Hydra's words are about this override; Hydra 1.0 quotes it, newer ones its key."""
    key = _key(override)
    return any(quoted in reason for quoted in (f"'{key}'", f"'{key.rpartition('.')[2]}'", override))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _did_you_mean(directory: Path, name: str, key: str) -> str:
    """Keys that are written like one that nothing has; "" if there is none, or it is known."""
    config = _compose(directory, name, [])
    add_defaults(config)
    known = [*PLAN_KEYS, *config]
    for section, values in config.items():
        if isinstance(values, DictConfig):
            known += (f"{section}.{option}" for option in values)
    close = [] if key in known else difflib.get_close_matches(key, known, cutoff=0.75)
    return f"; did you mean {' or '.join(close)}?" if close else ""
