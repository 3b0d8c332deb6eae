"""Parser errors in one line, which for an unknown option names the one that was meant."""

import argparse
import difflib
import re
import sys
from typing import NoReturn

from fairseq.tasks import TASK_DATACLASS_REGISTRY

from ....command_line import EXIT_USAGE, flag_value
from ..criterions import CRITERIONS
from ..models import ARCHITECTURES
from ..options.fields import REGISTERED
from .reported import is_first_to_report

_stock_format_help = argparse.ArgumentParser.format_help
_MORE_HELP = "options of models with experts: python -m fairseq_tutel options [WORD ...]"
_COMMON_TASKS = ("language_modeling", "translation")


def install() -> None:
    """Replace two methods of argparse, which prints up to 199 lines of usage before an error."""
    argparse.ArgumentParser.error = _refuse_arguments
    argparse.ArgumentParser.format_help = _format_help


def _format_help(parser: argparse.ArgumentParser) -> str:
    return f"{_stock_format_help(parser)}\n{_MORE_HELP}\n"


def _refuse_arguments(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    if choice := re.match(r"(argument --([\w-]+).*: '(.*?)') \(choose from (.*)\)", message):
        near = difflib.get_close_matches(choice[3], re.findall(r"[\w-]+", choice[4]), 3)
        if near:
            message = f"{choice[1]}, did you mean {' or '.join(near)}?"
        if registry := REGISTERED.get(choice[2].replace("-", "_")):
            message += f"; {registry.how_to_add()}"
    elif message.startswith("unrecognized arguments: "):
        message += _meant(parser, re.findall(r"(?<!\S)--[\w-]+", message))
    lists = "--help lists fairseq's options, python -m fairseq_tutel options this package's"
    text = f"{parser.prog}: error: {message} ({lists})\n"
    parser.exit(EXIT_USAGE, text if is_first_to_report(text) else None)


def _task_with(flag: str) -> str | None:
    """Return the task that has an option; the most common one if several have it."""
    name = flag[2:].replace("-", "_")
    tasks = [
        task
        for task, config in TASK_DATACLASS_REGISTRY.items()
        if name in getattr(config, "__dataclass_fields__", ())
    ]
    return next((task for task in (*_COMMON_TASKS, *tasks) if task in tasks), None)


def _meant(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    """Name the owner of the first unknown option that has one, or the closest known options."""
    configs = [("--arch", row.name, row.schema) for row in ARCHITECTURES.values()]
    configs += [("--criterion", name, row.config) for name, row in CRITERIONS.items()]
    owners: dict[str, list[tuple[str, str]]] = {}
    for kind, choice, config in configs:
        for name, field in config.__dataclass_fields__.items():
            if not str(field.default).startswith("${"):  # of the task
                owners.setdefault("--" + name.replace("_", "-"), []).append((kind, choice))
    for flag in unknown:
        if flag in owners:
            kind = owners[flag][0][0]
            names = " or ".join(name for of, name in owners[flag] if of == kind)
            given = flag_value(sys.argv[1:], kind)
            has = f"the command has {kind} {given}" if given else "which the command does not have"
            return f"; {flag} belongs to {kind} {names}, {has}"
        if task := _task_with(flag):
            given = flag_value(sys.argv[1:], "--task")
            chosen = given or f"{parser.get_default('task')}, the default"
            return f"; {flag} belongs to --task {task}; the task is {chosen}"
    near = [
        f"for {flag}, did you mean {close[0]}?"
        for flag in unknown
        if (close := difflib.get_close_matches(flag, [*parser._option_string_actions, *owners], 1))
    ]
    return "; ".join(["", *near])
