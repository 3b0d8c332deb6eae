"""``python -m fairseq_tutel`` prints this package's options and the folder of shipped configs."""

import importlib.util
import sys

from . import register
from .command_line import CONFIGS, EXIT_USAGE, run_and_exit

USAGE = """\
usage: python -m fairseq_tutel                     the options to begin with, other commands
       python -m fairseq_tutel options [WORD ...]  all options that this package adds to fairseq,
                                                   or those whose name or text has every word
       python -m fairseq_tutel architectures [WORD]  the names of --arch with experts, and their
                                                   layers that can get them, as a table
       python -m fairseq_tutel configs             the folder of shipped configs, for --config-dir
       python -m fairseq_tutel table               the page TABLE.md, with all options as tables
"""


def main(arguments: list[str] | None = None) -> int:
    """Return 0, 1 if fairseq is not installed or nothing matches, or 2 for unknown words."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["configs"]:
        sys.stdout.write(f"{CONFIGS}\n")
        return 0
    searches = arguments[:1] == ["options"]
    lists = arguments[:1] == ["architectures"] and len(arguments) <= 2
    if not searches and not lists and arguments not in ([], ["-h"], ["--help"], ["table"]):
        sys.stderr.write(f"{USAGE}error: unknown: {' '.join(arguments)}\n")
        return EXIT_USAGE
    if importlib.util.find_spec("fairseq") is None:
        sys.stderr.write(
            "fairseq is not installed: the options are those of fairseq-train. Without fairseq you "
            "can use fairseq_tutel.moe and fairseq_tutel.training\n"
        )
        return 1
    register()
    if lists:
        from .integrations.fairseq.models.listing import listing

        sys.stdout.write(found := listing(*arguments[1:]))
        if not found:
            sys.stderr.write(f"no --arch with experts has {arguments[1]!r} in its name\n")
        return 0 if found else 1
    from .integrations.fairseq.options import help

    if words := arguments[1:] if searches else []:
        found = help.matching(*words)
        sys.stdout.write(found)
        if not found:
            sys.stderr.write(
                f"no option of this package has {' and '.join(map(repr, words))} in its name or "
                "text; fairseq-train --help lists fairseq's own options\n"
            )
        return 0 if found else 1
    sys.stdout.write(
        help.markdown() if arguments == ["table"] else help.plain_text(everything=searches)
    )
    return 0


if __name__ == "__main__":
    run_and_exit(main)
