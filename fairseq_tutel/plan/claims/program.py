"""Program ``python -m fairseq_tutel.plan claims``: prints the claims and draws their figures."""

import argparse
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

from ...command_line import CommandLine
from .figures import draw_figures
from .report import detail, table
from .rows import CLAIMS


def describe_claims(arguments: Sequence[str]) -> str:
    """Return what ``plan claims`` prints, for its arguments."""
    parser = CommandLine(
        prog="python -m fairseq_tutel.plan claims",
        description="Every published claim about Tutel: published, predicted for the published "
        "machine, measured, and a verdict.",
    )
    parser.add_argument("--row", type=int, metavar="N", help="one claim, with formula and sources")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the figures there")
    ladder = "points of a cluster for the figures: the folder of scripts/slurm/submit_ladder.sh"
    parser.add_argument("--measured", type=Path, metavar="LADDER", help=ladder)
    options = parser.parse_args(arguments)
    row = options.row
    chosen = [claim for claim in CLAIMS if claim.number == row]
    if row is not None and not chosen:
        parser.error(f"--row {row}: there are 1 to {len(CLAIMS)}")
    for name in (None, "fairseq"):  # fairseq's import turns both up
        logging.getLogger(name).setLevel(logging.WARNING)
    if options.figures is not None:
        return "\n".join(map(str, _draw(parser, options)))
    if options.measured is not None:
        parser.error("--measured LADDER is for --figures FOLDER, which is not given")
    return detail(chosen[0]) if chosen else table()


def _draw(parser: CommandLine, options: argparse.Namespace) -> list[Path]:
    if options.measured is not None and not options.measured.is_dir():
        parser.error(f"--measured {options.measured}: there is no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, f"{parser.prog}: error: matplotlib is missing: pip install matplotlib\n")
    return draw_figures(options.figures, options.measured)
