"""Time and memory of cases that take turns, and what follows from the times.

Every repetition runs each case once, in an order of its own, so that whatever disturbs the machine
hits all cases alike. A CPU is timed by the wall clock. A GPU is timed by events behind queued
writes of a buffer: they empty the cache and let the host run ahead, so launches do not count.
``calls`` adds the wall clock of calls back to back, where they do.

Ratios are this layer's time (the first case of a point) over another case's in the same turn: the
median of the turns with its 95 % interval.
"""

import ctypes
import gc
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from program import Ranks, Report
from record import device_name, say, table
from torch import Tensor

# writes queued before a measurement on a GPU: about 2 ms of a 4 TB/s memory
_COVER_BYTES, _COVER_WRITES = 256 << 20, 32
Times = dict[str, dict[str, list[float]]]  # case -> phase -> milliseconds by repetition


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        forward: input number -> (outputs, gradients of the outputs); no gradients: forward only.
        leaves: tensors whose gradients are dropped before every repetition.
        select: called first, for example to choose a backend.
    """

    name: str
    forward: Callable[[int], tuple[Sequence[Tensor], Sequence[Tensor]]]
    leaves: Callable[[], Iterable[Tensor]] = tuple
    select: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Prepare one repetition."""
        self.select()
        for leaf in self.leaves():
            leaf.grad = None

    def run(self, number: int = 0, mark: Callable[[], None] = lambda: None) -> None:
        """Run one pass; call ``mark`` after the forward pass and after the backward pass."""
        outputs, grads = self.forward(number)
        mark()
        if grads:
            torch.autograd.backward(outputs, grads)
            mark()


def call(function: Callable[[], object]) -> Callable[[int], tuple[tuple, tuple]]:
    """Make the ``forward`` of a case without outputs."""

    def forward(_):
        function()
        return (), ()

    return forward


class _Clock:
    """Milliseconds between marks: ``wall``, ``processor`` or ``device``."""

    def __init__(self, kind: str, device: torch.device):
        self._events = kind == "device" and device.type == "cuda"
        self._waits = device.type == "cuda"
        self._now = time.process_time if kind == "processor" else time.perf_counter
        if self._events:
            self._cover = torch.empty(_COVER_BYTES, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        self._marks: list = []
        if self._events:
            torch.cuda.synchronize()
            for _ in range(_COVER_WRITES):
                self._cover.zero_()
        self.mark()

    def mark(self) -> None:
        if self._events:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
            return
        if self._waits:
            torch.cuda.synchronize()
        self._marks.append(self._now())

    def spans(self) -> list[float]:
        pairs = list(itertools.pairwise(self._marks))
        if not self._events:
            return [1e3 * (b - a) for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def time_cases(
    cases: Sequence[Case],
    ranks: Ranks,
    repetitions: int,
    *,
    warmup: int = 3,
    calls: int = 0,
    clock: str = "device",
    progress: Callable[[Times], None] = lambda times: None,
) -> Times:
    """Measure the milliseconds of every repetition, by case and phase, on this rank.

    Args:
        calls: > 0: add the phase ``wall``, the wall clock of one of so many calls back to back.
        clock: ``device``, ``wall`` or ``processor`` (time of this process on processors).
        progress: gets all times after each repetition.

    Returns:
        case -> phase -> ``repetitions`` values; ``both`` is forward plus backward. A case without
        gradients has ``forward`` only.
    """
    marks, wall = _Clock(clock, ranks.device), _Clock("wall", ranks.device)
    times: Times = {case.name: {} for case in cases}
    for number in range(-warmup, repetitions):
        # the same order on all ranks
        for case in random.Random(number).sample(cases, len(cases)):
            case.begin()
            ranks.wait()
            marks.begin()
            case.run(number % 1024, marks.mark)
            spans = marks.spans()
            found = dict(zip(("forward", "backward"), spans, strict=False))
            if len(spans) == 2:
                found["both"] = sum(spans)
            if calls:
                case.begin()
                ranks.wait()
                wall.begin()
                for turn in range(calls):
                    case.run(turn)
                wall.mark()
                found["wall"] = wall.spans()[0] / calls
            if number >= 0:
                for phase, span in found.items():
                    times[case.name].setdefault(phase, []).append(span)
        if number >= 0:
            progress(times)
    for case in cases:
        case.begin()
    return times


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """min, p20, p50 and p80, linearly interpolated."""
    tensor = torch.tensor(values, dtype=torch.float64)
    p20, p50, p80 = tensor.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return {"min": min(values), "p20": p20, "p50": p50, "p80": p80}


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(low, median, high): the interval holds the true median with a probability of ``level``.

    By order statistics: of n values the k-th smallest and largest, with the largest k at which a
    fair coin shows fewer than k heads in n throws with a probability of at most (1 - level) / 2.
    Fewer than 6 values give their range.
    """
    ordered, n = sorted(values), len(values)
    k, below = 0, 0.5**n
    while below <= (1 - level) / 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return ordered[k - 1], percentiles(values)["p50"], ordered[n - k]


def ratio_of_pairs(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Interval of the median of one case's time over another's in the same turn."""
    return median_interval([a / b for a, b in zip(above, below, strict=True)])


def main_phase(phases: dict[str, Any]) -> str:
    """Return the phase that ratios are of."""
    return "both" if "both" in phases else "forward"


def summarise(times: Times, ranks: Ranks, phase: str | None = None) -> dict[str, Any]:
    """Record of the slowest rank's times: percentiles, ratios to the first case. Collective.

    Args:
        phase: that ratios are of, both passes by default; empty: no ratios.
    """
    raw = {
        name: {phase: ranks.slowest(values) for phase, values in phases.items()}
        for name, phases in times.items()
        if phases
    }
    main = {name: phases[phase or main_phase(phases)] for name, phases in raw.items()}
    first = next(iter(main.values()), [])
    others = main if phase != "" else {}
    return {
        "ms": {
            name: {phase: percentiles(values) for phase, values in phases.items()}
            for name, phases in raw.items()
        },
        "this_over": {
            name: ratio_of_pairs(first, values)
            for name, values in others.items()
            if values is not first and len(values) == len(first)
        },
        "raw_ms": raw,
    }


@dataclass
class Point:
    """Cases that take turns, the layer itself first.

    Attributes:
        about: numbers and sizes for the record.
        not_run: name -> reason of cases that are left out.
        derive: record of the times -> case -> further columns.
        phase: that ratios are of, see :func:`summarise`.
        repetitions: in place of those of the sweep.
    """

    name: str
    cases: list[Case]
    about: dict[str, Any] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], dict[str, dict[str, Any]]] = lambda found: {}
    phase: str | None = None
    repetitions: int = 0


def sweep(
    report: Report,
    points: Iterable[Point],
    ranks: Ranks,
    repetitions: int,
    *,
    goals: Callable[[dict[str, Any]], list[dict]] = lambda results: [],
    **how,
) -> dict[str, Any]:
    """Measure one point after the other with :func:`time_cases`; keep, print, write the record.

    Args:
        goals: results by point -> goals (program.goal).
    """
    results: dict[str, Any] = {}

    def keep(point: Point, times: Times, ended: bool = False) -> None:
        found = summarise(times, ranks, point.phase)
        derived = {"derived": point.derive(found)}
        results[point.name] = {**point.about, **found, **derived, "not_run": point.not_run}
        report.keep(lambda: {"results": results, "goals": goals(results)}, ended=ended)

    for point in points:
        one = ranks.world_size == 1  # else a record is a collective call
        progress = (lambda times, point=point: keep(point, times)) if one else lambda times: None
        try:
            turns = point.repetitions or repetitions
            times = time_cases(point.cases, ranks, turns, progress=progress, **how)
            keep(point, times, ended=True)
        except torch.cuda.OutOfMemoryError:
            if not one:  # the others wait for this one
                raise
            reason = "it ran out of memory on this GPU"
            point.not_run |= {case.name: reason for case in point.cases}
            keep(point, {}, ended=True)
        point.cases.clear()
        free_memory(ranks.device)
    report.finish({"results": results, "goals": goals(results)}, show)
    return results


def show(result: dict[str, Any]) -> None:
    """Print a row for each case of each point."""
    say(f"{result['benchmark']} on {device_name(result)}, {result['world_size']} rank(s)")
    rows = []
    for point, found in result["results"].items():
        for case, ms in found["ms"].items():
            row = {
                "": point,
                "case": case,
                **{f"{phase} ms": of["p50"] for phase, of in ms.items()},
            }
            if found["this_over"]:
                row["this/that"] = found["this_over"].get(case)
            rows.append(row | found["derived"].get(case, {}))
        for case, reason in found["not_run"].items():
            say(f"{point}: {case}: not run: {reason}")
    say(table(rows))


def agreement(cases: Sequence[Case], inputs: Sequence[Tensor], limit: float) -> dict[str, float]:
    """Compare output and gradients of ``inputs`` of all cases with the first one's.

    Returns case -> largest RMS error ratio; raises RuntimeError if one is above ``limit``.
    """
    reference: list[Tensor] = []
    ratios = {}
    for case in cases:
        case.begin()
        outputs, grads = case.forward(0)
        if grads:
            torch.autograd.backward(outputs, grads)
        got = [outputs[0].detach().double()]
        got += [x.grad.double() for x in inputs if x.grad is not None]
        case.begin()
        reference = reference or got
        pairs = list(zip(got, reference, strict=True))
        ratio = max(((a - b).square().sum() / b.square().sum()).sqrt().item() for a, b in pairs)
        if not ratio <= limit:  # NaN fails, too
            raise RuntimeError(
                f"{case.name} does not compute what {cases[0].name} does: RMS error ratio "
                f"{ratio:.3g}, at most {limit:g} expected"
            )
        ratios[case.name] = ratio
    return ratios


def peak_memory(case: Case, device: torch.device) -> int | None:
    """Bytes that one pass adds: allocated on a GPU, resident (VmHWM) on Linux; else None."""
    case.begin()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated
    else:
        try:
            ctypes.CDLL(None).malloc_trim(0)  # or a free block would count as used before
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before, peak = _status_bytes("VmRSS"), lambda: _status_bytes("VmHWM")
        except (OSError, AttributeError):  # not Linux, or not glibc
            return None
    case.run()
    case.begin()
    return peak() - before


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", text)[1])


def those_that_fit(
    cases: Sequence[Case], device: torch.device, skipped: dict[str, str]
) -> list[Case]:
    """Return the cases that find their memory on a GPU; ``skipped`` gets the others."""
    if device.type != "cuda":
        return list(cases)
    found = []
    for case in cases:
        case.begin()
        try:
            case.run()
            found.append(case)
        except torch.cuda.OutOfMemoryError:
            skipped[case.name] = "it ran out of memory on this GPU"
        case.begin()
        free_memory(device)
    return found


def free_memory(device: torch.device) -> None:
    """Collect garbage and empty the GPU's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
