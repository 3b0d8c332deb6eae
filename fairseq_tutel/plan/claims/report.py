"""The table of claims, and one claim in detail."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...command_line import CONFIGS, CommandLine, columns
from .predictions import PREDICTIONS
from .rows import CLAIMS, Claim

WITHIN, BETTER, THERE, NOT = "within 15 %", "better, like for like", "there", "not reached"
_TOLERANCE = 0.15
_MEASURED = Path(__file__).with_name("measured.json")
# a checkout has the result files; run_gpu.sh's are named after the GPU
RESULTS = CONFIGS.resolve().parent / "scripts" / "bench" / "results"
# run_gpu.sh: the presets whose ratio to the dense formulation a row compares
_GPU_FILES = {1: ("layer-blog-8gpu",), 22: ("layer-fig14",), 5: ("kernels-meta-1.1t",)}


@dataclass(frozen=True)
class Measured:
    """One measured value.

    Args:
        what: was measured.
        file: result file, in scripts/bench/results.
        path: keys of the value in the file.
        value: of the file, to four digits.
        over: keys of the value by which it was divided (default: none).
    """

    what: str
    file: str
    path: tuple[str | int, ...]
    value: float
    over: tuple[str | int, ...] = ()

    def read(self, results: Path = RESULTS) -> float:
        """Return the value from the result file."""
        content = json.loads((results / self.file).read_text())
        value = _at(content, self.path)
        return value / _at(content, self.over) if self.over else value


def _at(content: Any, keys: Sequence[str | int]) -> Any:
    return functools.reduce(lambda part, key: part[key], keys, content)


@functools.cache
def measured() -> dict[int, list[Measured]]:
    """Return the measured values by the number of their row."""
    rows: dict[str, list[dict[str, Any]]] = json.loads(_MEASURED.read_text())
    return {int(number): [Measured(**entry) for entry in found] for number, found in rows.items()}


def measured_on_gpus(number: int, results: Path = RESULTS) -> list[str]:
    """Return what ``run_gpu.sh`` has measured for a row, as texts; empty before a GPU's hour."""
    found = []
    for name in _GPU_FILES.get(number, ()):
        for path in sorted(results.glob(f"{name}-*.json")):
            content = json.loads(path.read_text())
            slots = content.get("derived", {}).get("assign_slots (triton)", {})
            layer = content.get("ratios", {}).get("triton", {})
            value = slots.get("times faster than torch", layer.get("dense/this both"))
            if value is not None:
                found.append(f"{value:.3g} ({path.name})")
    return found


def predicted(claim: Claim) -> list[float]:
    """Return the predicted figures of a claim; none if the planner has no formula for it."""
    return PREDICTIONS[claim.number]() if claim.number in PREDICTIONS else []


def verdict(claim: Claim) -> str:
    """Return one of the four verdicts of a claim."""
    values = [entry.value for entry in measured().get(claim.number, ())]
    attempts = [predicted(claim), values if claim.like_for_like else []]
    for attempt in attempts:
        if claim.published and len(attempt) == len(claim.published):
            pairs = list(zip(attempt, claim.published, strict=True))
            if all(abs(own / theirs - 1) <= _TOLERANCE for own, theirs in pairs):
                return WITHIN
            if attempt is values and all(own > theirs for own, theirs in pairs):
                return BETTER
    if claim.test and not claim.published and not claim.partly:
        return THERE
    return NOT


def _figures(values: Sequence[float], unit: str) -> str:
    return ", ".join(f"{value:.3g}{unit}" for value in values)


def table() -> str:
    """Return all claims as aligned lines."""
    head = ("row", "claim", "published", "predicted", "measured here", "on a GPU", "verdict")
    rows = [head]
    for claim in CLAIMS:
        values = [entry.value for entry in measured().get(claim.number, ())]
        rows.append(
            (
                str(claim.number),
                claim.text,
                _figures(claim.published, claim.unit),
                _figures(predicted(claim), claim.unit),
                _figures(values, claim.unit),
                "; ".join(measured_on_gpus(claim.number)),
                verdict(claim),
            )
        )
    counts = {
        name: sum(verdict(c) == name for c in CLAIMS) for name in (WITHIN, BETTER, THERE, NOT)
    }
    lines = columns(rows, right={0})
    return "\n".join([*lines, "", ", ".join(f"{n} {name}" for name, n in counts.items())])


def detail(claim: Claim) -> str:
    """Return one claim with its source, formula, files, test and reason."""
    rows = [
        (f"claim {claim.number}", claim.text),
        ("source", claim.source),
        ("published", _figures(claim.published, claim.unit)),
        ("predicted", _figures(predicted(claim), claim.unit)),
        ("formula", claim.formula),
        *((f"measured: {m.what}", f"{m.value:.3g} ({m.file})") for m in _of(claim)),
        ("on a GPU", "; ".join(measured_on_gpus(claim.number)) or "not measured"),
        ("test", claim.test),
        ("verdict", verdict(claim)),
        ("note", claim.reason),
    ]
    return "\n".join(columns([row for row in rows if row[1]]))


def _of(claim: Claim) -> list[Measured]:
    return measured().get(claim.number, [])


def describe_claims(arguments: Sequence[str]) -> str:
    """Return what ``plan claims`` prints, for its arguments."""
    parser = CommandLine(
        prog="python -m fairseq_tutel.plan claims",
        description="Every published claim about Tutel: published, predicted for the published "
        "machine, measured, and a verdict.",
    )
    parser.add_argument("--row", type=int, metavar="N", help="one claim, with formula and sources")
    row = parser.parse_args(arguments).row
    chosen = [claim for claim in CLAIMS if claim.number == row]
    if row is not None and not chosen:
        parser.error(f"--row {row}: there are 1 to {len(CLAIMS)}")
    for name in (None, "fairseq"):  # fairseq's import turns both up
        logging.getLogger(name).setLevel(logging.WARNING)
    return detail(chosen[0]) if chosen else table()
