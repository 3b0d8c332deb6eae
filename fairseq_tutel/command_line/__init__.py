"""Parts of this package's own commands: errors, tables, exit codes, folder of shipped configs.

Standard library only.
"""

import argparse
import os
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NoReturn

from .quiet import silence_imports

# A training process has saved a checkpoint on SIGUSR1 and wants to be queued again. 85 is neither a
# code of the shell (126-165) nor of sysexits.h (64-78).
EXIT_REQUEUE = 85
# The folder of the launcher that started this rank, for notes of its ranks: the hashes of errors
# that were printed, and in a file the exit code of a job whose ranks have left in good order.
LAUNCHER, OUTCOME = "FAIRSEQ_TUTEL_LAUNCHER", "outcome"
# Such a folder that the batch script has made for the first node's (scripts/slurm/common.sh)
FOLDER = "FAIRSEQ_TUTEL_FOLDER"
# Set for a run that goes on from its last checkpoint, whatever its command says of the start.
GOES_ON = "FAIRSEQ_TUTEL_GOES_ON"
# A user's error before any rank was started (argparse uses the same code).
EXIT_USAGE = 2

# a folder for the PYTHONPATH of fairseq's programs
STARTUP = str(Path(__file__).with_name("startup"))
# in a checkout a link to the repository's folder; an installed package holds the files themselves
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class CommandLine(argparse.ArgumentParser):
    """ArgumentParser with errors of one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (--help shows the options)\n")


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Exit with the result of ``main``; quietly if its output has no reader (``| head``)."""
    silence_imports()
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter flushes once more on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows of cells as aligned lines; columns numbered in ``right`` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def flag_value(words: Sequence[str], *flags: str) -> str | None:
    """Return the last ``--flag value`` or ``--flag=value`` of any of ``flags``, or None."""
    value = None
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in flags and equals:
            value = text
        elif word in flags and i + 1 < len(words):
            value = words[i + 1]
    return value


def config_directory(file: str) -> Path:
    """Return ``configs`` of the working directory if it has the file, else the shipped folder."""
    here = Path("configs")
    return here if (here / file).is_file() else CONFIGS


def with_extension(name: str) -> str:
    """Return ``NAME.yaml`` for a config's name with or without its extension."""
    return name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
