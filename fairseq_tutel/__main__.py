"""``python -m fairseq_tutel``: the options that this package adds to fairseq, and its commands.

``python -m fairseq_tutel configs`` prints the folder of the shipped Hydra configs, for
``--config-dir``; ``python -m fairseq_tutel table`` the options as tables of a page
(integrations/fairseq/options/README.md).
"""

import importlib.util
import sys

from . import register
from .command_line import CONFIGS, run_and_exit

USAGE = """\
usage: python -m fairseq_tutel            the options that this package adds to fairseq
       python -m fairseq_tutel configs    the folder of the shipped configs, for --config-dir
       python -m fairseq_tutel table      the options as tables in Markdown
"""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where fairseq is not installed, 2 for unknown words."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["configs"]:
        sys.stdout.write(f"{CONFIGS}\n")
        return 0
    if arguments not in ([], ["-h"], ["--help"], ["table"]):
        sys.stderr.write(f"{USAGE}error: unknown: {' '.join(arguments)}\n")
        return 2
    if importlib.util.find_spec("fairseq") is None:
        sys.stderr.write("fairseq is not installed: only fairseq_tutel.moe can be used\n")
        return 1
    register()
    from .integrations.fairseq.options import help

    sys.stdout.write(help.markdown() if arguments == ["table"] else help.plain_text())
    return 0


if __name__ == "__main__":
    run_and_exit(main)
