"""``python -m fairseq_tutel``: print the options that this package adds to fairseq, and where the
shipped configs are."""

import importlib.util
import sys

from . import register
from .command_line import CONFIGS, EXIT_USAGE, run_and_exit

USAGE = """\
usage: python -m fairseq_tutel                   the options that this package adds to fairseq
       python -m fairseq_tutel options [WORD]    the same; those whose name or text has the word
       python -m fairseq_tutel configs           the folder of the shipped configs, for --config-dir
       python -m fairseq_tutel table             the options as tables in Markdown
"""


def main(arguments: list[str] | None = None) -> int:
    """Return 0, 1 if fairseq is not installed or no option matches, or 2 for unknown words."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["configs"]:
        sys.stdout.write(f"{CONFIGS}\n")
        return 0
    searches = arguments[:1] == ["options"] and len(arguments) <= 2
    if not searches and arguments not in ([], ["-h"], ["--help"], ["table"]):
        sys.stderr.write(f"{USAGE}error: unknown: {' '.join(arguments)}\n")
        return EXIT_USAGE
    if importlib.util.find_spec("fairseq") is None:
        sys.stderr.write("fairseq is not installed: only fairseq_tutel.moe can be used\n")
        return 1
    register()
    from .integrations.fairseq.options import help

    if searches and len(arguments) == 2:
        found = help.matching(arguments[1])
        sys.stdout.write(found)
        if not found:
            sys.stderr.write(f"no option has {arguments[1]!r} in its name or text\n")
        return 0 if found else 1
    sys.stdout.write(help.markdown() if arguments == ["table"] else help.plain_text())
    return 0


if __name__ == "__main__":
    run_and_exit(main)
