"""``python -m fairseq_tutel``: the options that this package adds to fairseq, and its commands."""

import importlib.util
import sys


def main() -> int:
    """Exit code 1 where fairseq is not installed."""
    if importlib.util.find_spec("fairseq") is None:
        sys.stderr.write("fairseq is not installed: only fairseq_tutel.moe can be used\n")
        return 1
    from .training.option_help import make_parser

    sys.stdout.write(make_parser().format_help())
    return 0


if __name__ == "__main__":
    sys.exit(main())
