"""Every published claim about Tutel: published, predicted, measured, and a verdict.

    python scripts/bench/claims.py
    python scripts/bench/claims.py --row 19
    python scripts/bench/claims.py --figures FOLDER --measured LADDER

claims.yaml has the claims. The planner predicts them for the published machine
(claims_predictions.py), files in results/ have them measured, or a test shows them. Nothing is
fitted to a claim.
"""

import argparse
import contextlib
import fnmatch
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from claims_figures import FIGURES, RESULTS, draw_figure
from claims_predictions import PREDICTIONS
from program import quiet_logs
from record import say

from fairseq_tutel.command_line import CommandLine, columns, run_and_exit

WITHIN, BETTER, THERE, NOT = "within 15 %", "better, like for like", "there", "not reached"
_TOLERANCE = 0.15


def read_value(entry: Mapping[str, Any], path: Path) -> float:
    """Return the value of an entry of claims.yaml from a result file; LookupError if not there."""
    content = json.loads(path.read_text(encoding="utf-8"))
    value, over = (_find(content, entry[key]) if key in entry else 1 for key in ("path", "over"))
    return value / over


def _find(content: Any, keys: Sequence[str | int]) -> float:
    """Return the last value at these keys, each of which may be a pattern of names."""
    found = [content]
    for key in keys:
        if isinstance(key, int):
            found = [part[key] for part in found]
        else:
            found = [part[n] for part in found for n in part if fnmatch.fnmatchcase(n, key)]
    return found[-1]


@dataclass(frozen=True)
class Claim:
    """One published claim; claims.yaml says what the fields mean."""

    number: int
    text: str
    source: str
    published: Sequence[float] = ()
    unit: str = "x"
    formula: str = ""
    measured: Sequence[dict[str, Any]] = ()
    gpu: Sequence[dict[str, Any]] = ()
    like_for_like: bool = False
    test: str = ""
    partly: bool = False
    reason: str = ""

    def values(self) -> list[float]:
        """Return the measured figures."""
        return [entry["value"] for entry in self.measured]

    def predicted(self) -> list[float]:
        """Return the predicted figures; none if the planner has no formula."""
        return PREDICTIONS[self.number]() if self.number in PREDICTIONS else []

    def on_gpus(self, results: Path = RESULTS) -> str:
        """Return what ``run_gpu.sh`` has measured of this claim; empty before a GPU's hour."""
        found = []
        for path in sorted(results.glob(f"{self.gpu[0]['file']}-*.json")) if self.gpu else ():
            with contextlib.suppress(LookupError):  # a case did not fit, or was not reached
                values = [read_value(entry, path) for entry in self.gpu]
                found.append(f"{self.figures(values)} ({path.name})")
        return "; ".join(found)

    def verdict(self) -> str:
        """Return one of the four verdicts."""
        values = self.values()
        for attempt in (self.predicted(), values if self.like_for_like else []):
            if self.published and len(attempt) == len(self.published):
                ratios = [own / of for own, of in zip(attempt, self.published, strict=True)]
                if all(abs(ratio - 1) <= _TOLERANCE for ratio in ratios):
                    return WITHIN
                if attempt is values and min(ratios) > 1:
                    return BETTER
        return THERE if self.test and not self.published and not self.partly else NOT

    def figures(self, values: Sequence[float]) -> str:
        """Return values with this claim's unit."""
        return ", ".join(f"{value:.3g}{self.unit}" for value in values)


_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CLAIMS = {number: Claim(number, **fields) for number, fields in _FILE.items()}


def table() -> str:
    """Return all claims as aligned lines."""
    rows: list[tuple[str, ...]] = [
        ("row", "claim", "published", "predicted", "measured here", "on a GPU", "verdict")
    ]
    for number, claim in CLAIMS.items():
        figures = map(claim.figures, (claim.published, claim.predicted(), claim.values()))
        rows.append((str(number), claim.text, *figures, claim.on_gpus(), claim.verdict()))
    verdicts = [row[-1] for row in rows]
    counts = [f"{verdicts.count(name)} {name}" for name in (WITHIN, BETTER, THERE, NOT)]
    return "\n".join([*columns(rows, right={0}), "", ", ".join(counts)])


def detail(claim: Claim) -> str:
    """Return one claim with its source, formula, files, test and reason."""
    rows = [
        (f"claim {claim.number}", claim.text),
        ("source", claim.source),
        ("published", claim.figures(claim.published)),
        ("predicted", claim.figures(claim.predicted())),
        ("formula", claim.formula),
        *((f"measured: {m['what']}", f"{m['value']:.3g} ({m['file']})") for m in claim.measured),
        ("on a GPU", claim.on_gpus() or "not measured"),
        ("test", claim.test),
        ("verdict", claim.verdict()),
        ("note", claim.reason),
    ]
    return "\n".join(columns([row for row in rows if row[1]]))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the claims, or draw their figures."""
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, metavar="N", help="one claim, with formula and sources")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the figures there")
    ladder = "points of a cluster for the figures: the folder of scripts/slurm/submit_ladder.sh"
    parser.add_argument("--measured", type=Path, metavar="LADDER", help=ladder)
    options = parser.parse_args(argv)
    row, folder, ladder = options.row, options.figures, options.measured
    if row is not None and row not in CLAIMS:
        parser.error(f"--row {row}: there are 1 to {len(CLAIMS)}")
    if ladder is not None and folder is None:
        parser.error("--measured LADDER is for --figures FOLDER, which is not given")
    if ladder is not None and not ladder.is_dir():
        parser.error(f"--measured {ladder}: there is no such folder")
    quiet_logs()
    if folder is None:
        say(table() if row is None else detail(CLAIMS[row]))
        return 0
    if importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, f"{parser.prog}: error: matplotlib is missing: pip install matplotlib\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in FIGURES.items():
        path = folder / f"claims-{name}.png"
        draw_figure(make(CLAIMS, ladder), path)
        say(str(path))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
