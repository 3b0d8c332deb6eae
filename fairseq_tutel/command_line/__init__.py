"""What this package's own commands share (standard library only): errors, tables, exit codes, and
where the shipped Hydra configs and hardware profiles are."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NoReturn

from .quiet import silence_imports

# A training process that was asked (SIGUSR1) to make room has saved a checkpoint and wants to be
# queued again: the launcher passes the code through to scripts/slurm/train.sbatch. 85 is free of
# the shell's codes (126-165) and of those in sysexits.h (64-78).
EXIT_REQUEUE = 85
# One that has saved a checkpoint with more experts (--moe-grow-at), upon which the launcher starts
# the ranks again; RESTARTS is set for ranks of a launcher that does.
EXIT_GROWN = 86
RESTARTS = "FAIRSEQ_TUTEL_RESTARTS"
# A folder in which the ranks of a launcher note the errors that they print: all ranks find most of
# a user's errors, and the first prints each. A rank makes the folder, the launcher removes it.
REPORTED = "FAIRSEQ_TUTEL_REPORTED"
# A user's error, found before any rank was started (argparse uses the same code).
EXIT_USAGE = 2

# in a checkout a link to the repository's folder; an installed package holds the files themselves
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line: without the usage, which --help shows."""

    def error(self, message: str) -> NoReturn:
        """See argparse; exit code 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (--help shows the options)\n")


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Exit with what ``main`` returns, quietly if the reader of its output has ended (``| head``).

    What importing fairseq prints is left out.
    """
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
    """Rows of cells as lines of aligned columns; those numbered in ``right`` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def flag_value(words: Sequence[str], *flags: str) -> str | None:
    """Return the last value of any of ``flags`` in a command, ``--flag value`` or ``--flag=value``;
    None if there is none."""
    value = None
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in flags and equals:
            value = text
        elif word in flags and i + 1 < len(words):
            value = words[i + 1]
    return value


def config_directory(file: str) -> Path:
    """``configs`` of the working directory where it holds the file (a copy that the user changed),
    else the shipped folder; ``file`` is relative to it, such as ``hardware/h100.yaml``."""
    here = Path("configs")
    return here if (here / file).is_file() else CONFIGS


def with_extension(name: str) -> str:
    """``NAME.yaml`` of a config's name, with or without its extension."""
    return name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
