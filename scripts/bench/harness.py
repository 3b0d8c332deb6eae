"""Time and memory of cases that take turns, their ratios and goals.

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
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from program import Ranks
from record import Report, percentiles, ratio_of_pairs
from torch import Tensor

# writes queued before a measurement on a GPU: about 2 ms of a 4 TB/s memory
_COVER_BYTES, _COVER_WRITES = 256 << 20, 32
_NO_MEMORY = "it ran out of memory on this GPU"
Times = dict[str, dict[str, list[float]]]  # case -> phase -> milliseconds by repetition


@dataclass(frozen=True)
class Case:
    """Something to time."""

    name: str
    # input number -> (outputs, gradients of the outputs); no gradients: forward only
    forward: Callable[[int], tuple[Sequence[Tensor], Sequence[Tensor]]]
    # tensors whose gradients are dropped before a repetition
    leaves: Callable[[], Iterable[Tensor]] = tuple
    select: Callable[[], object] = lambda: None  # called first, for example to choose a backend

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


def call(function: Callable[[int], object]) -> Callable[[int], tuple[tuple, tuple]]:
    """Make the ``forward`` of a case without gradients: a function of the input number."""

    @torch.no_grad()
    def forward(number):
        function(number)
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
    cases, ranks: Ranks, repetitions: int, times: Times, *, warmup=3, calls=0, clock="device"
) -> None:
    """Measure the milliseconds of every repetition, by case and phase, on this rank.

    Phases are ``forward`` and, with gradients, ``backward`` and their sum ``both``.

    Args:
        times: gets the repetitions, each when all cases have run.
        warmup: repetitions before those that count.
        calls: > 0: add the phase ``wall``, the wall clock of one of so many calls back to back.
        clock: ``device``, ``wall`` or ``processor`` (time of this process on processors).
    """
    marks, wall = _Clock(clock, ranks.device), _Clock("wall", ranks.device)

    def measure(case, number):
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
        return found

    for number in range(-warmup, repetitions):
        order = random.Random(number).sample(cases, len(cases))  # the same on all ranks
        turn = {case.name: measure(case, number) for case in order}
        for case in cases if number >= 0 else ():
            for phase, span in turn[case.name].items():
                times.setdefault(case.name, {}).setdefault(phase, []).append(span)
    for case in cases:
        case.begin()


@dataclass(frozen=True)
class Goal:
    """Bound of one figure, at least or at most; ``column`` is that of the printed table."""

    case: str
    column: str
    bound: float
    at_most: bool = False

    def judge(self, point: str, found: dict[str, Any]) -> dict[str, Any] | None:
        """Return the goal with the figure of a point's record; None without the figure."""
        figures = {"this/that": found["this_over"].get(self.case, [None] * 3)[1]}
        figure = (figures | found["derived"].get(self.case, {})).get(self.column)
        if figure is None:
            return None
        bound = f"{'at most' if self.at_most else 'at least'} {self.bound:g}"
        text = f"{point}, {self.case}: {self.column} {bound}"
        reached = figure <= self.bound if self.at_most else figure >= self.bound
        return {"goal": text, "ratio": figure, "bound": self.bound, "reached": reached}


@dataclass
class Point:
    """Cases that take turns, the layer itself first."""

    name: str
    cases: list[Case]
    about: dict[str, Any] = field(default_factory=dict)  # numbers and sizes for the record
    not_run: dict[str, str] = field(default_factory=dict)  # name -> reason of cases left out
    # record of the times -> case -> further columns
    derive: Callable[[dict[str, Any]], dict[str, dict[str, Any]]] = lambda found: {}
    goals: Sequence[Goal] = ()
    # called with the cases that fit in memory, before they are timed; further ``about``
    check: Callable[[list[Case]], dict[str, Any]] = lambda cases: {}
    phase: str = "both"  # that ratios are of; empty: no ratios
    repetitions: int = 0  # in place of those of the sweep

    def leave_out_what_does_not_fit(self, ranks: Ranks) -> None:
        """Run each case once; those that find no memory on a GPU are not run again."""
        for case in list(self.cases):
            case.begin()
            ranks.wait()
            try:
                case.run()
            except torch.cuda.OutOfMemoryError:
                if ranks.world_size > 1:  # the others wait for this one
                    raise
                self.cases.remove(case)
                self.not_run[case.name] = _NO_MEMORY
            case.begin()
            free_memory(ranks.device)

    def record(self, times: Times, ranks: Ranks) -> dict[str, Any]:
        """Return the slowest rank's times, ratios and derived columns. Collective."""
        raw = {
            case: {phase: ranks.slowest(values) for phase, values in phases.items()}
            for case, phases in times.items()
        }
        ms = {
            case: {phase: percentiles(values) for phase, values in phases.items()}
            for case, phases in raw.items()
        }
        over = {}
        if self.phase and raw:
            first, *others = (phases.get(self.phase, phases["forward"]) for phases in raw.values())
            ratios = (ratio_of_pairs(first, other) for other in others)
            over = dict(zip(list(raw)[1:], ratios, strict=True))
        found = {"ms": ms, "this_over": over, "raw_ms": raw}
        derived = self.derive(found)
        return {**self.about, **found, "derived": derived, "not_run": self.not_run}


def sweep(
    name: str,
    options,
    ranks: Ranks,
    points: Iterable[Point],
    *,
    repetitions: int,
    file: str = "",
    about: dict[str, Any] | None = None,
    warmup: int = 3,
    **how,
) -> None:
    """Measure one point after the other; print and write the record. Collective.

    Args:
        name: of the benchmark.
        options: command line, see ``program.COMMON``.
        repetitions: without ``--repetitions``; 2 with ``--tiny``.
        file: name of the result in runs/bench without ``--output``.
        about: further entries of the record.
        warmup: passes before those that count; with 0 a case that finds no memory is an error.
        how: further arguments of :func:`time_cases`.
    """
    how.setdefault("clock", getattr(options, "clock", "device"))
    warmup = min(warmup, 1) if options.tiny else warmup
    usual = 2 if options.tiny else getattr(options, "repetitions", None) or repetitions
    about = about or {}
    output = str(options.output or f"runs/bench/{file}.json")
    output = output.replace("{preset}", about.get("preset", ""))
    report = Report(name, ranks, output, **about)
    measured: dict[str, Any] = {"results": {}, "goals": []}

    def keep(point: Point, times: Times) -> None:
        found = measured["results"][point.name] = point.record(times, ranks)
        judged = (each.judge(point.name, found) for each in point.goals)
        measured["goals"] += [each for each in judged if each]
        report.write(measured)

    for point in points:
        if warmup:
            point.leave_out_what_does_not_fit(ranks)
        times: Times = {}
        turns, rest = point.repetitions or usual, max(0, warmup - 1)
        alone = ranks.world_size == 1  # else a record is a collective call
        try:
            point.about |= point.check(point.cases)
            time_cases(point.cases, ranks, turns, times, warmup=rest, **how)
        except torch.cuda.OutOfMemoryError:  # later than in the first run
            if not alone:
                raise
            times, point.derive = {}, lambda found: {}
            point.not_run |= {case.name: _NO_MEMORY for case in point.cases}
        except BaseException:
            if alone and times:
                keep(point, times)
            raise
        keep(point, times)
        point.cases.clear()
        free_memory(ranks.device)
    report.write(measured, complete=True)


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


def free_memory(device: torch.device) -> None:
    """Collect garbage and empty the GPU's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
