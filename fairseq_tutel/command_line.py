"""What this package's own commands share: errors in arguments, tables (standard library only)."""

from __future__ import annotations

import argparse
from collections.abc import Container, Sequence
from typing import NoReturn

from .exit_codes import EXIT_USAGE


class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line: without the usage, which --help shows."""

    def error(self, message: str) -> NoReturn:
        """See argparse; exit code 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (--help shows the options)\n")


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
