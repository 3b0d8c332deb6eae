"""The configuration of a run, from a config with overrides or from a training command.

Hydra composes a config as in fairseq-hydra-train: over fairseq's schema, with the defaults of the
registered model, task, criterion and optimizer. fairseq's own parser reads the flags of
fairseq-train.
"""

import argparse
import contextlib
import dataclasses
import difflib
import io
import re
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from fairseq import options as options_of_fairseq
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.utils import import_user_module
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ..command_line import config_directory, with_extension
from ..integrations.fairseq import register
from ..integrations.fairseq.models import ARCHITECTURES
from .any_model import is_any_model

try:
    from hydra import compose, initialize_config_dir
except ImportError:  # Hydra 1.0, of official fairseq 0.12.2
    from hydra.experimental import compose, initialize_config_dir

TRAINING = ("fairseq-train", "fairseq-hydra-train")
SUPPORTED = list(ARCHITECTURES)


def load_config(directory: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose the YAML file ``name`` of ``directory`` with Hydra's ``key=value`` overrides.

    Raises:
        ValueError: there is no such file, or Hydra or a schema refuses an override.
    """
    if not (directory / with_extension(name)).is_file():
        known = ", ".join(sorted(p.stem for p in directory.glob("*.yaml"))) or "none"
        raise ValueError(f"no config {name!r} in {directory} (there are: {known})")
    name = with_extension(name).removesuffix(".yaml")
    register()
    hydra_init(name)
    # Hydra 1.1 and newer warn without this argument; 1.0 does not have it
    version = {} if hydra.__version__.startswith("1.0") else {"version_base": "1.1"}
    try:
        with warnings.catch_warnings():
            # fairseq uses what Hydra 1.1 deprecated; Hydra 1.0 prints warnings of its parts
            warnings.simplefilter("ignore")
            with initialize_config_dir(str(directory.resolve()), **version):
                config = compose(config_name=name, overrides=list(overrides))
        _check_supported("model._name is ", config.model._name)
        add_defaults(config)
    except (HydraException, OmegaConfBaseException) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(" ".join(lines[:2]) + _nearest(str(error))) from None
    return config


def _nearest(text: str) -> str:
    """Name the keys that are closest to the unknown one in an error of Hydra."""
    unknown = re.search(r"override '([\w.]+)'|full_key: ([\w.]+)", text)
    if unknown is None:
        return ""
    sections = [*vars(FairseqConfig()).items()]
    sections += [("model", row.schema) for row in ARCHITECTURES.values()]
    known = dict.fromkeys(f"{name}.{key}" for name, kind in sections for key in _fields(kind))
    key = unknown[1] or unknown[2]
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]}?" if near and near[0] != key else ""


def _fields(kind: Any) -> dict[str, dataclasses.Field]:
    return getattr(kind, "__dataclass_fields__", {})


def _check_supported(option: str, arch: str | None) -> None:
    if ARCH_MODEL_NAME_REGISTRY.get(arch) not in SUPPORTED and not is_any_model(arch):
        known = ", ".join(SUPPORTED)
        raise ValueError(f"{option}{arch}: the planner supports {known} and NAME_moe only")


def load_command(words: Sequence[str]) -> tuple[str, DictConfig]:
    """Read a training command, with any launcher in front of it.

    Returns:
        The name of the program and the config that it trains with.

    Raises:
        ValueError: no program in the command trains, or the program would refuse its arguments.
    """
    start = next((i for i, word in enumerate(words) if Path(word).name in TRAINING), None)
    if start is None:
        raise ValueError(
            f"behind -- there is neither {' nor '.join(TRAINING)}: {shlex.join(words)}"
        )
    program, given = Path(words[start]).name, list(words[start + 1 :])
    if program == "fairseq-hydra-train":
        parser = argparse.ArgumentParser()
        parser.add_argument("--config-dir", "-cd", type=Path)
        parser.add_argument("--config-name", "-cn", default="config")
        options, overrides = parser.parse_known_args(given)
        file = with_extension(options.config_name)
        directory = options.config_dir or config_directory(file)
        return program, load_config(directory, options.config_name, overrides)
    register()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            given = _import_user_dir(given)
            parser = options_of_fairseq.get_training_parser()
            known, _ = parser.parse_known_args(given)
            for option, supported in (("arch", SUPPORTED), ("optimizer", ["adam"])):
                if getattr(known, option) is None:
                    names = ", ".join(supported)
                    raise ValueError(
                        f"{program}: the command has no --{option}; the planner supports {names}"
                    )
            _check_supported("--arch ", known.arch)
            config = convert_namespace_to_omegaconf(
                options_of_fairseq.parse_args_and_arch(parser, input_args=given)
            )
    except SystemExit as exit:  # argparse prints its reason; checks of options exit with theirs
        reason = exit.code if isinstance(exit.code, str) else said.getvalue()
        raise ValueError(f"{program}: {reason.strip().rpartition('error: ')[2]}") from None
    except OmegaConfBaseException as error:
        line = str(error).splitlines()[0]
        if "task." in line:  # fairseq's default is translation
            line += f": --task {known.task} has no such option; give --task language_modeling"
        raise ValueError(f"{program}: {line}") from None
    return program, config


def _import_user_dir(words: list[str]) -> list[str]:
    """Import the user dir of a command, unless it is this package; return the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--user-dir", default=None)
    known, others = parser.parse_known_args(words)
    if known.user_dir and Path(known.user_dir).name != __name__.partition(".")[0]:
        import_user_module(known)
    return others
