"""Timing and memory of cases that take turns, so that whatever disturbs the machine hits all alike.

Method: every repetition runs each case once, forward and backward, beginning with another case each
time, on inputs that rotate. Wall clock on a CPU. On a GPU events, behind queued writes of a buffer:
they empty the cache and let the host run ahead, as it does in training, so that the time between
two events is the device's, without waiting for launches.
"""

import ctypes
import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PHASES = ("forward", "backward", "both")
# Writes that are queued before a measurement on a GPU: about 2 ms of a 4 TB/s memory.
_COVER_BYTES, _COVER_WRITES = 256 << 20, 32


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        name: in tables.
        forward: input number -> (outputs, gradients of the outputs); no gradients: forward only.
        leaves: tensors whose gradients are dropped before every repetition.
        select: called first, for example to choose a backend.
    """

    name: str
    forward: Callable[[int], tuple[Sequence[Tensor], Sequence[Tensor]]]
    leaves: Callable[[], Iterable[Tensor]] = tuple
    select: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Make ready for one repetition."""
        self.select()
        for leaf in self.leaves():
            leaf.grad = None


class _WallClock:
    def begin(self) -> None:
        self._marks: list = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        return [1e3 * (b - a) for a, b in itertools.pairwise(self._marks)]


class _ProcessorClock(_WallClock):
    """The processor's time for this process: what others on the machine take does not count."""

    def mark(self) -> None:
        self._marks.append(time.process_time())


class _DeviceClock(_WallClock):
    def __init__(self, device: torch.device):
        self._cover = torch.empty(_COVER_BYTES, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        super().begin()
        torch.cuda.synchronize()
        for _ in range(_COVER_WRITES):
            self._cover.zero_()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def milliseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(self._marks)]


def time_cases(
    cases: Sequence[Case],
    device: torch.device,
    repetitions: int,
    *,
    warmup: int = 3,
    barrier: Callable[[], None] = lambda: None,
    progress: Callable[[dict], None] = lambda times: None,
    processor_time: bool = False,
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every repetition, by case and phase.

    Args:
        barrier: called before each measurement, to start ranks together.
        progress: gets what is known after each repetition, all cases being measured equally often.
        processor_time: on a CPU the time of all threads on processors, not the wall clock's. Of one
            thread it is what the wall clock would say on an idle machine, waiting apart.

    Returns:
        name -> phase -> ``repetitions`` values; ``both`` is forward plus backward of one
        repetition. A case without gradients has ``forward`` only.
    """
    clock = _ProcessorClock() if processor_time else _WallClock()
    if device.type == "cuda":
        clock = _DeviceClock(device)
    times = {case.name: {} for case in cases}
    for number in range(-warmup, repetitions):
        first = number % len(cases)
        for case in [*cases[first:], *cases[:first]]:
            case.begin()
            barrier()
            clock.begin()
            clock.mark()
            outputs, grads = case.forward(number % 1024)
            clock.mark()
            if grads:
                torch.autograd.backward(outputs, grads)
                clock.mark()
            del outputs
            spans = clock.milliseconds()
            if len(spans) == 2:
                spans.append(sum(spans))
            if number >= 0:
                for phase, span in zip(PHASES, spans, strict=False):
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

    By order statistics (the sign test turned round), for any distribution: of n values the k-th
    smallest and largest, with the largest k at which a fair coin shows fewer than k heads in n
    throws with a probability of at most (1 - level) / 2. Of fewer than 6 values it is their range.
    """
    ordered, n = sorted(values), len(values)
    k, below = 0, 0.5**n
    while below <= (1 - level) / 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return ordered[k - 1], percentiles(values)["p50"], ordered[n - k]


MEMORY_METHOD = {
    "cuda": "torch.cuda.max_memory_allocated during one forward and backward pass, minus what was "
    "allocated before it",
    "cpu": "peak resident set of the process (VmHWM, reset before) during one forward and backward "
    "pass, minus the resident set before it",
}


def peak_memory(case: Case, device: torch.device) -> int | None:
    """Bytes that one forward and backward pass of the case adds; None where it cannot be read.

    NOTE: a CPU's figure needs Linux; it counts what is touched, not what is reserved.
    """
    case.begin()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _run_once(case)
        return torch.cuda.max_memory_allocated() - before
    before = _reset_peak()
    if before is None:
        return None
    _run_once(case)
    return _status_bytes("VmHWM") - before


def fits(case: Case, device: torch.device) -> bool:
    """Whether one forward and backward pass finds the memory that it needs on a GPU."""
    case.begin()
    try:
        _run_once(case)
    except torch.cuda.OutOfMemoryError:
        case.begin()
        free_memory(device)
        return False
    return True


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _run_once(case: Case) -> None:
    outputs, grads = case.forward(0)
    if grads:
        torch.autograd.backward(outputs, grads)
    del outputs
    case.begin()


def _reset_peak() -> int | None:
    """Resident bytes after the peak was reset to them; None if the system does not allow it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or a free block would count as used before
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status_bytes("VmRSS")
    except (OSError, AttributeError):  # not Linux, or not glibc
        return None


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", text)[1])
