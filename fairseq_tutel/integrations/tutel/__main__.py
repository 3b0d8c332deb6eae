"""``python -m fairseq_tutel.integrations.tutel PROGRAM ARGS`` or ``-m MODULE ARGS``."""

import runpy
import sys
from pathlib import Path

from . import install


def main() -> None:
    """Run a program that imports Tutel."""
    _, *words = sys.argv
    if not words or words == ["-m"]:
        sys.exit("usage: python -m fairseq_tutel.integrations.tutel [-m] PROGRAM ARGS")
    install()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
