"""Command line of the planner.

Arguments are checked before torch and fairseq are imported, which takes seconds.
"""

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import CONFIGS, CommandLine, config_directory, with_extension

_KEYS = {"gpus": int, "hardware": str, "vocabulary": int, "sentence": int, "tokens": float}
_EPILOG = """\
key=value:
  gpus=N              ranks (default: the world size of config or command)
  hardware=NAME       a profile in CONFIG_DIR/hardware, or a shipped one (default: a100-80g)
  vocabulary=N        size of the dictionary if the data is not here
  sentence=N          tokens per source and target sentence (default: the most that the run takes)
  tokens=N            tokens of the training, for its duration in days (default: 300e9)
  anything else       an override of the config, as for fairseq-hydra-train: +model.x=1 adds a key,
                      ~task.x removes one

Plan a config, or a training command with any launcher in front:
  python -m fairseq_tutel.plan --config-name meta_1.1t gpus=512
  python -m fairseq_tutel.plan gpus=8 -- fairseq-train data-bin --arch transformer_lm_gpt_moe ...
  python -m fairseq_tutel.plan --config-name meta_1.1t gpus=512 hardware=h200 +model.moe_wire=fp8
  python -m fairseq_tutel.plan --config-name meta_1.1t gpus=512 model.moe_expert_count=64 --best

The exit status is 1, with the reason on standard error, if the run is impossible.
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of ``python -m fairseq_tutel.plan``."""
    options = CommandLine(
        prog="python -m fairseq_tutel.plan",
        usage="%(prog)s [options] [key=value ...] (--config-name NAME | -- COMMAND)",
        description="Parameters, memory, traffic and predicted speed of a training run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--config-name", help="a YAML file of the config folder")
    options.add_argument(
        "--config-dir",
        type=Path,
        help="folder of the configs (default: ./configs if the file is there, else the shipped "
        f"ones, {CONFIGS})",
    )
    options.add_argument(
        "--best",
        action="store_true",
        help="also plan the exchange, overlap, placement and r of the shortest update",
    )
    options.add_argument("override", nargs="*", metavar="key=value", help="see below")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the planner; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    command, own_parser = words[cut + 1 :], parser()
    options = own_parser.parse_intermixed_args(words[:cut])  # keys before and behind options
    if (options.config_name is None) == (not command):
        own_parser.error("give either --config-name NAME, or a training command behind --")
    try:
        if behind := [word for word in command if word.partition("=")[0] in _KEYS and "=" in word]:
            raise ValueError(
                f"{behind[0]} is an option of the planner and stands behind --: put it before --, "
                f"as in {own_parser.prog} {' '.join(behind)} -- {command[0]} ..."
            )
        own, overrides = _split(options.override)
        if command and overrides:
            raise ValueError(f"{overrides[0]}: overrides of a command are options of the command")
        _run(options, own, overrides, command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options, own: dict[str, Any], overrides: list[str], command: list[str]) -> None:
    from .any_model import is_any_model
    from .compose import load_command, load_config
    from .hardware import load_hardware

    for name in (None, "fairseq"):  # fairseq's import turns both up
        logging.getLogger(name).setLevel(logging.WARNING)
    profile = own.get("hardware", "a100-80g")
    directory, file = options.config_dir, f"hardware/{with_extension(profile)}"
    if directory is None or not (directory / file).is_file():
        directory = config_directory(file)
    hardware = load_hardware(directory, profile)
    if command:
        name, config = load_command(command)
    else:
        name = options.config_name
        directory = options.config_dir or config_directory(with_extension(name))
        config = load_config(directory, name, overrides)
    run = _run_model if is_any_model(config.model._name) else _run_ours
    run(options, own, config, name, hardware)


def _run_ours(options, own: dict[str, Any], config, name: str, hardware) -> None:
    """Plan a run of one of this package's architectures."""
    from .planner import best_plan, check, grown_plan, make_plan
    from .report import describe, describe_best, describe_grown
    from .settings import read_settings

    sizes = {key: own.get(key) for key in ("gpus", "vocabulary", "sentence")}
    plan = make_plan(read_settings(config, name, **sizes), hardware)
    best, grown = best_plan(plan) if options.best else None, grown_plan(plan)
    tokens = own.get("tokens", 300e9)
    print(describe(plan, tokens))
    if best:
        print(describe_best(plan, best, tokens))
    check(best or plan)
    if grown:
        print(describe_grown(plan, grown))
        check(grown)


def _run_model(options, own: dict[str, Any], config, name: str, hardware) -> None:
    """Plan a run of ``NAME_moe``."""
    from .any_model import grown_model_plan, plan_model
    from .planner import check_run
    from .report import describe_grown, describe_model

    unknown = [f"{key}={own[key]:g}" for key in ("sentence", "tokens") if key in own]
    if asked := ["--best"] * options.best + unknown:
        raise ValueError(
            f"{asked[0]}: the planner predicts no activations and no time of {config.model._name}"
        )
    plan = plan_model(config, name, hardware, own.get("gpus"), own.get("vocabulary"))
    print(describe_model(plan))
    grown = grown_model_plan(plan, config, own.get("vocabulary"))
    if grown:
        print(describe_grown(plan, grown))
    for each in filter(None, (plan, grown)):
        check_run(each.settings.gpus, hardware, each.at_update, "at least ")


def _split(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the words into the planner's own keys and overrides of the config."""
    own, overrides = {}, []
    for word in words:
        key, _, text = word.partition("=")
        if key in _KEYS:
            try:
                own[key] = _KEYS[key](text)
            except ValueError:
                own[key] = -1
            if _KEYS[key] is not str and not own[key] > 0:
                raise ValueError(f"{word} is not a positive number")
        elif near := difflib.get_close_matches(key, _KEYS, 1, cutoff=0.75):
            raise ValueError(f"{word}: there is no such key; did you mean {near[0]}?")
        else:
            overrides.append(word)
    return own, overrides
