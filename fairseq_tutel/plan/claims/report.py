"""The table of claims, and one claim in detail."""

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...command_line import CONFIGS, columns
from .predictions import PREDICTIONS
from .rows import CLAIMS, Claim

WITHIN, BETTER, THERE, NOT = "within 15 %", "better, like for like", "there", "not reached"
_TOLERANCE = 0.15
_MEASURED = Path(__file__).with_name("measured.json")
# a checkout has the result files; run_gpu.sh's are named after the GPU
RESULTS = CONFIGS.resolve().parent / "scripts" / "bench" / "results"


@dataclass(frozen=True)
class Measured:
    """One measured value."""

    what: str
    file: str  # in scripts/bench/results
    path: tuple[str | int, ...]  # keys of the value in the file
    value: float  # to four digits
    over: tuple[str | int, ...] = ()  # keys of the value by which it was divided

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


def _over_this(results: dict[str, Any], case: str = "dense") -> list[float]:
    (found,) = results.values()
    return [1 / found["this_over"][case][1]]


def _slots(results: dict[str, Any]) -> list[float]:
    (found,) = results.values()
    return [
        of["times faster than torch"]
        for name, of in found["derived"].items()
        if name.startswith("assign_slots")
    ]


def _tokens_over_dense(results: dict[str, Any]) -> list[float]:
    derived = {name: of for point in results.values() for name, of in point["derived"].items()}
    return [derived["moe"]["tokens/s"] / derived["dense"]["tokens/s"]]


def _swin(results: dict[str, Any]) -> list[float]:
    """Return training and inference, each with the most images that were measured."""
    points = {(of["mode"], of["images"]): of["this_over"] for of in results.values()}
    most = [max(key for key in points if key[0] == mode) for mode in ("training", "inference")]
    return [1 / points[key]["dense formulation"][1] for key in most]


# by row: the files of run_gpu.sh without the GPU's name, and the value in their results
_ON_GPUS: dict[int, tuple[str, Callable[[dict[str, Any]], list[float]]]] = {
    1: ("layer-blog-8gpu", _over_this),
    2: ("train-meta-half-rank", _tokens_over_dense),
    5: ("kernels-meta-1.1t", _slots),
    13: ("swin-small-32", _swin),
    14: ("layer-meta-1.1t", functools.partial(_over_this, case="products")),
    22: ("layer-fig14", _over_this),
}


def measured_on_gpus(claim: Claim, results: Path = RESULTS) -> list[str]:
    """Return what ``run_gpu.sh`` has measured for a claim, as texts; empty before a GPU's hour."""
    name, read = _ON_GPUS.get(claim.number, ("none", _slots))
    found = []
    for path in sorted(results.glob(f"{name}-*.json")):
        with contextlib.suppress(KeyError, ValueError):  # a case did not fit, or was not reached
            values = read(json.loads(path.read_text(encoding="utf-8"))["results"])
            found.append(f"{_figures(values, claim.unit)} ({path.name})")
    return found


def predicted(claim: Claim) -> list[float]:
    """Return the predicted figures of a claim; none if the planner has no formula for it."""
    return PREDICTIONS[claim.number]() if claim.number in PREDICTIONS else []


def verdict(claim: Claim) -> str:
    """Return one of the four verdicts of a claim."""
    values = [entry.value for entry in _of(claim)]
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
        values = [entry.value for entry in _of(claim)]
        rows.append(
            (
                str(claim.number),
                claim.text,
                _figures(claim.published, claim.unit),
                _figures(predicted(claim), claim.unit),
                _figures(values, claim.unit),
                "; ".join(measured_on_gpus(claim)),
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
        ("on a GPU", "; ".join(measured_on_gpus(claim)) or "not measured"),
        ("test", claim.test),
        ("verdict", verdict(claim)),
        ("note", claim.reason),
    ]
    return "\n".join(columns([row for row in rows if row[1]]))


def _of(claim: Claim) -> list[Measured]:
    return measured().get(claim.number, [])
