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
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from claims_figures import RESULTS, draw_figures
from claims_predictions import PREDICTIONS
from program import quiet_logs
from record import say

from fairseq_tutel.command_line import CommandLine, columns, run_and_exit

WITHIN, BETTER, THERE, NOT = "within 15 %", "better, like for like", "there", "not reached"
_TOLERANCE = 0.15


@dataclass(frozen=True)
class Measured:
    """One measured value; claims.yaml says what the fields mean."""

    what: str
    file: str
    path: Sequence[str | int]
    value: float
    over: Sequence[str | int] = ()

    def read(self) -> float:
        """Return the value from the result file."""
        content = json.loads((RESULTS / self.file).read_text(encoding="utf-8"))
        value, over = (
            functools.reduce(lambda part, key: part[key], keys, content)
            for keys in (self.path, self.over)
        )
        return value / over if self.over else value


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
    like_for_like: bool = False
    test: str = ""
    partly: bool = False
    reason: str = ""

    def measurements(self) -> list[Measured]:
        """Return what result files have of this claim."""
        return [Measured(**entry) for entry in self.measured]

    def values(self) -> list[float]:
        """Return the measured figures."""
        return [entry.value for entry in self.measurements()]

    def predicted(self) -> list[float]:
        """Return the predicted figures; none if the planner has no formula."""
        return PREDICTIONS[self.number]() if self.number in PREDICTIONS else []

    def on_gpus(self, results: Path = RESULTS) -> str:
        """Return what ``run_gpu.sh`` has measured of this claim; empty before a GPU's hour."""
        name, read = _ON_GPUS.get(self.number, ("none", _only))
        found = []
        for path in sorted(results.glob(f"{name}-*.json")):
            with contextlib.suppress(KeyError, ValueError):  # a case did not fit, or none was run
                values = read(json.loads(path.read_text(encoding="utf-8"))["results"])
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


def _only(results: dict[str, Any]) -> dict[str, Any]:
    (found,) = results.values()
    return found


def _over_this(results: dict[str, Any], case: str = "dense") -> list[float]:
    return [1 / _only(results)["this_over"][case][1]]


def _slots(results: dict[str, Any]) -> list[float]:
    derived = _only(results)["derived"].items()
    return [of["times faster than torch"] for name, of in derived if "assign_slots" in name]


def _tokens_over_dense(results: dict[str, Any]) -> list[float]:
    derived = {name: of for point in results.values() for name, of in point["derived"].items()}
    return [derived["moe"]["tokens/s"] / derived["dense"]["tokens/s"]]


def _swin(results: dict[str, Any]) -> list[float]:
    """Return training and inference, each with the most images that were measured."""
    points = {(of["mode"], of["images"]): of["this_over"] for of in results.values()}
    most = [max(key for key in points if key[0] == mode) for mode in ("training", "inference")]
    return [1 / points[key]["dense formulation"][1] for key in most]


# by row: the files of run_gpu.sh without the GPU's name, and the values in their results
_ON_GPUS: dict[int, tuple[str, Callable[[dict[str, Any]], list[float]]]] = {
    1: ("layer-blog-8gpu", _over_this),
    2: ("train-meta-half-rank", _tokens_over_dense),
    5: ("kernels-meta-1.1t", _slots),
    13: ("swin-small-32", _swin),
    14: ("layer-meta-1.1t", functools.partial(_over_this, case="products")),
    22: ("layer-fig14", _over_this),
}


def table() -> str:
    """Return all claims as aligned lines."""
    rows = [("row", "claim", "published", "predicted", "measured here", "on a GPU", "verdict")]
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
        *((f"measured: {m.what}", f"{m.value:.3g} ({m.file})") for m in claim.measurements()),
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
    for path in draw_figures(folder, ladder, CLAIMS):
        say(str(path))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
