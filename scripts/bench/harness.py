"""Time and memory of cases that take turns, and what follows from the times.

Every repetition runs each case once, in an order of its own, so that whatever disturbs the machine
hits all cases alike. A CPU is timed by the wall clock. A GPU is timed by events behind queued
writes of a buffer: they empty the cache and let the host run ahead, so launches do not count.
``calls`` adds the wall clock of calls back to back, where they do.

Ratios are this layer's time (the first case of a point) over another case's in the same turn: the
median of the turns with its 95 % interval.
"""

import argparse
import ctypes
import gc
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from program import Ranks, Report, goal
from record import device_name, percentiles, ratio_of_pairs, say, table
from torch import Tensor

# writes queued before a measurement on a GPU: about 2 ms of a 4 TB/s memory
_COVER_BYTES, _COVER_WRITES = 256 << 20, 32
_NO_MEMORY = "it ran out of memory on this GPU"
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
    select: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """Prepare one repetition."""
        self.select()
        for leaf in self.leaves():
            leaf.grad = None

    def run(self, number: int = 0, mark: Callable[[], None] = lambda: None) -> Sequence[Tensor]:
        """Run one pass; call ``mark`` after the forward pass and after the backward pass."""
        outputs, grads = self.forward(number)
        mark()
        if grads:
            torch.autograd.backward(outputs, grads)
            mark()
        return outputs


def call(function: Callable[[], object]) -> Callable[[int], tuple[tuple, tuple]]:
    """Make the ``forward`` of a case without outputs."""

    def forward(_):
        function()
        return (), ()

    return forward


class _Clock:
    """Milliseconds between marks: ``wall``, ``processor`` or ``device``."""

    def __init__(self, kind: str, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._events = kind == "device" and self._on_gpu
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
        if self._on_gpu:
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
        warmup: repetitions before those that count.
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
            for phase, span in found.items() if number >= 0 else ():
                times[case.name].setdefault(phase, []).append(span)
        if number >= 0:
            progress(times)
    for case in cases:
        case.begin()
    return times


def summarise(times: Times, ranks: Ranks, phase: str | None = None) -> dict[str, Any]:
    """Record the slowest rank's times: percentiles, ratios to the first case. Collective.

    Args:
        phase: that ratios are of, both passes by default; empty: no ratios.
    """
    raw: dict[str, dict[str, list[float]]] = {}
    ms: dict[str, dict[str, dict[str, float]]] = {}
    over: dict[str, tuple[float, float, float]] = {}
    first: list[float] = []
    for case, phases in times.items():
        if not phases:
            continue
        raw[case] = {name: ranks.slowest(values) for name, values in phases.items()}
        ms[case] = {name: percentiles(values) for name, values in raw[case].items()}
        main = raw[case][phase or ("both" if "both" in phases else "forward")]
        if first and phase != "" and len(main) == len(first):
            over[case] = ratio_of_pairs(first, main)
        first = first or main
    return {"ms": ms, "this_over": over, "raw_ms": raw}


@dataclass(frozen=True)
class Goal:
    """Bound of one figure, at least or at most; ``column`` is that of the printed table."""

    case: str
    column: str
    bound: float
    at_most: bool = False

    def judge(self, point: str, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the goal by the record of a point; nothing without the figure."""
        figures = {"this/that": found["this_over"].get(self.case, [None] * 3)[1]}
        figures |= found["derived"].get(self.case, {})
        if figures.get(self.column) is None:
            return []
        bound = f"{'at most' if self.at_most else 'at least'} {self.bound:g}"
        text = f"{point}, {self.case}: {self.column} {bound}"
        return [goal(text, figures[self.column], self.bound, self.at_most)]


@dataclass
class Point:
    """Cases that take turns, the layer itself first.

    Attributes:
        about: numbers and sizes for the record.
        not_run: name -> reason of cases that are left out.
        derive: record of the times -> case -> further columns.
        goals: bounds of figures of this point.
        phase: that ratios are of, see :func:`summarise`.
        repetitions: in place of those of the sweep.
    """

    name: str
    cases: list[Case]
    about: dict[str, Any] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], dict[str, dict[str, Any]]] = lambda found: {}
    goals: Sequence[Goal] = ()
    phase: str | None = None
    repetitions: int = 0


def sweep(
    name: str,
    options: argparse.Namespace,
    ranks: Ranks,
    points: Iterable[Point],
    *,
    repetitions: int,
    file: str = "",
    about: dict[str, Any] | None = None,
    goals: Callable[[dict[str, Any]], list[dict]] = lambda results: [],
    warmup: int = 3,
    seconds_between: float = 5.0,
    **how,
) -> dict[str, Any]:
    """Measure one point after the other; print and write the record. Collective.

    Args:
        name: of the benchmark.
        options: command line, see ``program.COMMON``.
        repetitions: without ``--repetitions``; 2 with ``--tiny``.
        file: name of the result in runs/bench (default: ``name``).
        about: further entries of the record.
        goals: results by point -> further goals (program.goal), for those over several points.
        seconds_between: two writes of a record that is not complete.
        how: further arguments of :func:`time_cases`.

    Returns:
        point -> its record.
    """
    how["clock"] = how.get("clock") or getattr(options, "clock", "device")
    how["warmup"] = min(warmup, 1) if options.tiny else warmup
    usual = 2 if options.tiny else getattr(options, "repetitions", None) or repetitions
    alone = ranks.world_size == 1  # else a record is a collective call
    results: dict[str, Any] = {}
    judged: dict[str, list[dict]] = {}

    def measured() -> dict[str, Any]:
        return {"results": results, "goals": [*itertools.chain(*judged.values()), *goals(results)]}

    def keep(point: Point, times: Times, ended: bool = False) -> None:
        found = summarise(times, ranks, point.phase)
        found["derived"] = point.derive(found)
        results[point.name] = {**point.about, **found, "not_run": point.not_run}
        judged[point.name] = [
            each for bound in point.goals for each in bound.judge(point.name, found)
        ]
        report.keep(measured, ended=ended)

    about = about or {}
    output = options.output and str(options.output).replace("{preset}", about.get("preset", ""))
    with Report(name, ranks, output, file or name, **about) as report:
        report.seconds_between = seconds_between
        for point in points:
            progress = (lambda times, point=point: keep(point, times)) if alone else lambda _: None
            turns = point.repetitions or usual
            try:
                times = time_cases(point.cases, ranks, turns, progress=progress, **how)
                keep(point, times, ended=True)
            except torch.cuda.OutOfMemoryError:
                if not alone:  # the others wait for this one
                    raise
                point.not_run |= {case.name: _NO_MEMORY for case in point.cases}
                keep(point, {}, ended=True)
            point.cases.clear()
            free_memory(ranks.device)
        report.finish(measured(), show)
    return results


def show(result: dict[str, Any]) -> None:
    """Print a row for each case of each point."""
    say(f"{result['benchmark']} on {device_name(result)}, {result['world_size']} rank(s)")
    rows = []
    for point, found in result["results"].items():
        for case, ms in found["ms"].items():
            medians = {f"{phase} ms": of["p50"] for phase, of in ms.items()}
            row = {"": point, "case": case, **medians}
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
        got = [case.run()[0].detach().double()]
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
    """Return the bytes that one pass adds: allocated on a GPU, resident on Linux; else None."""
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
            skipped[case.name] = _NO_MEMORY
        case.begin()
        free_memory(device)
    return found


def free_memory(device: torch.device) -> None:
    """Collect garbage and empty the GPU's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
