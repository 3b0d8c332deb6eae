"""One line for a user's error, where a fairseq program would end with a traceback per rank.

Printed in one line are

- a ValueError or OSError that a ``raise`` statement of this package raised: a wrong option, file or
  number of ranks, with what is wrong and what to do in its text; and where memory ran out;
- the same, or a plain Exception, from a ``raise`` or ``assert`` of fairseq's that has a text, with
  its place in fairseq;
- a file that cannot be opened or written, and a config that Hydra or OmegaConf refuses;
- what argparse refuses, without up to 199 lines of usage, with the option that was meant.

Any other error keeps its traceback, and so does every error where the program is not one of
fairseq's, or ``FAIRSEQ_TUTEL_TRACEBACK=1``. Ctrl-C is reported in one line by the first rank.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import re
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import fairseq
import torch
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf.errors import OmegaConfBaseException

from ....command_line import EXIT_USAGE, REPORTED, flag_value
from ....distributed import process_world
from ..criterions import CRITERIONS
from ..models import ARCHITECTURES
from ..options.fields import REGISTERED
from ..programs import program

_PACKAGE = str(Path(__file__).resolve().parents[3])
_FAIRSEQ = str(Path(fairseq.__file__).resolve().parents[1])
_VARIABLE = "FAIRSEQ_TUTEL_TRACEBACK"
# functions that print an error: the one below, and torch's, which calls it
_HOOKS = ("excepthook", "_distributed_excepthook")
_stock_format_help = argparse.ArgumentParser.format_help
_MORE_HELP = "options of models with experts: python -m fairseq_tutel options [WORD]"
_COMMON_TASKS = ("language_modeling", "translation")
_interrupted = False


def install() -> None:
    """Put the hook before the one that is there; for fairseq's own programs only."""
    if program() is None:
        return
    sys.excepthook = _hook(sys.excepthook)
    argparse.ArgumentParser.error = _refuse_arguments
    argparse.ArgumentParser.format_help = _format_help
    if program() == "fairseq-hydra-train":
        # Hydra then leaves errors to the hook, and prints those of others in full
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)


def explain(error: BaseException, trace: TracebackType | None) -> str | None:
    """The text of a user's error, see the module docstring; None for any other error."""
    frames = traceback.extract_tb(trace)
    if not frames or not _is_of_a_user(error):
        return None
    if isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None) or ""
        text = (f"{key}: " if key else "") + str(error).partition("\n")[0]
        registry = REGISTERED.get(key.rpartition(".")[2])
        return f"{text}; {registry.how_to_add()}" if registry else text
    file, line = os.path.realpath(frames[-1].filename), frames[-1].line or ""
    if file.startswith(_PACKAGE + os.sep) and line.startswith("raise "):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    place = os.path.relpath(file, _FAIRSEQ)
    found = place.partition(os.sep)[0] in ("fairseq", "fairseq_cli")
    said = re.search("[a-z]{3}", str(error))  # and not numbers alone
    if found and said and (line.startswith("raise ") or isinstance(error, AssertionError)):
        return f"{' '.join(str(error).split())} ({place}:{frames[-1].lineno})"
    return None


def _is_of_a_user(error: BaseException | None) -> bool:
    """Not one that passes another kind of error on, as where a save fails for its own reason; but
    one that explains that memory ran out.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if error is None or isinstance(error, OmegaConfBaseException):
        return True
    known = type(error) is Exception or isinstance(error, (ValueError, OSError, AssertionError))
    return known and _is_of_a_user(error.__cause__)


def _hook(before):
    def excepthook(kind, error, trace):
        # hydra-core 1.0 fails to print an error on Python 3.10; the error itself is the context
        if isinstance(error, TypeError) and "argument 'etype'" in str(error) and error.__context__:
            error = error.__context__
            kind, trace = type(error), error.__traceback__
        rank, world_size = process_world()
        if os.environ.get(_VARIABLE, "0") not in ("", "0"):
            before(kind, error, trace)
        elif _interrupted or isinstance(error, KeyboardInterrupt):
            # also where a rank fails because another has ended before it
            if os.environ.get("RANK", "0") == "0" and rank == 0:
                sys.stderr.write(f"{program()}: interrupted\n")
        elif (text := explain(error, trace)) is not None:
            where = f" (rank {rank})" if world_size > 1 else ""
            if _is_first_to_report(text):
                sys.stderr.write(f"{program()}: error{where}: {text} [{_VARIABLE}=1 shows where]\n")
        else:
            before(kind, error, trace)

    return excepthook


def _interrupt(signum, frame):
    """As Python's own handler, but the printing of an error is not interrupted."""
    global _interrupted
    _interrupted = True
    while frame is not None:
        if frame.f_code.co_name in _HOOKS:
            return
        frame = frame.f_back
    raise KeyboardInterrupt


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
    parser.exit(EXIT_USAGE, text if _is_first_to_report(text) else None)


def _is_first_to_report(text: str) -> bool:
    """Return whether no other rank of this launcher has printed the same error."""
    folder = os.environ.get(REPORTED)
    if not folder:
        return True
    try:
        os.makedirs(folder, exist_ok=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # no room, or a folder that is this node's alone
        return True
    return True


def _task_with(flag: str) -> str | None:
    """Return the task that has an option; the most common one if several have it."""
    name = flag[2:].replace("-", "_")
    tasks = [
        task
        for task, config in TASK_DATACLASS_REGISTRY.items()
        if name in getattr(config, "__dataclass_fields__", ())
    ]
    return next((task for task in (*_COMMON_TASKS, *tasks) if task in tasks), None)


def _chosen_task(parser: argparse.ArgumentParser) -> str:
    given = flag_value(sys.argv[1:], "--task")
    return given or f"{parser.get_default('task')}, the default"


def _meant(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    """Whose the first unknown option is that this package has, or which were meant."""
    configs = {f"--arch {row.name}": row.config for row in ARCHITECTURES.values()}
    configs |= {f"--criterion {name}": config for name, config in CRITERIONS.items()}
    owners = {
        "--" + name.replace("_", "-"): choice
        for choice, config in reversed(configs.items())
        for name, field in config.__dataclass_fields__.items()
        if not str(field.default).startswith("${")  # of the task
    }
    for flag in unknown:
        if flag in owners:
            return f"; {flag} belongs to {owners[flag]}, which the command does not have"
        if task := _task_with(flag):
            return f"; {flag} belongs to --task {task}; the task is {_chosen_task(parser)}"
    near = [
        f"for {flag}, did you mean {close[0]}?"
        for flag in unknown
        if (close := difflib.get_close_matches(flag, [*parser._option_string_actions, *owners], 1))
    ]
    return "; ".join(["", *near])
