"""How this package's own commands refuse their arguments (standard library only)."""

from __future__ import annotations

import argparse
from typing import NoReturn

from .exit_codes import EXIT_USAGE


class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line: without the usage, which --help shows."""

    def error(self, message: str) -> NoReturn:
        """See argparse; exit code 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (--help shows the options)\n")
