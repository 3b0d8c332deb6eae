"""``python -m fairseq_tutel``: the options that this package adds to fairseq, and its commands.

``python -m fairseq_tutel configs`` prints the folder of the shipped Hydra configs, for
``--config-dir``.
"""

import importlib.util
import sys

from . import register
from .shipped_configs import CONFIGS

USAGE = """\
usage: python -m fairseq_tutel            the options that this package adds to fairseq
       python -m fairseq_tutel configs    the folder of the shipped configs, for --config-dir
"""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where fairseq is not installed, 2 for unknown words."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["configs"]:
        sys.stdout.write(f"{CONFIGS}\n")
        return 0
    if arguments and arguments not in (["-h"], ["--help"]):
        sys.stderr.write(f"{USAGE}error: unknown: {' '.join(arguments)}\n")
        return 2
    if importlib.util.find_spec("fairseq") is None:
        sys.stderr.write("fairseq is not installed: only fairseq_tutel.moe can be used\n")
        return 1
    register()
    from .hosts.fairseq.option_help import make_parser

    sys.stdout.write(make_parser().format_help())
    return 0


if __name__ == "__main__":
    sys.exit(main())
