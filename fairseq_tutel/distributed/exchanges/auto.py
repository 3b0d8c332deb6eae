"""Whichever of the linear and the hierarchical exchange is faster for a message of its size.

In the cost model (``predict``) both cost a constant (latency, messages) and a time per byte: the
hierarchical one has the smaller constant, the linear one the smaller time per byte. Where their
lines cross depends on machine and ranks; users of Tutel's 2DH lose speed with it below some hundred
GPUs (microsoft/tutel issue 214). So both are measured when the exchange is built, at every size
until it is clear which one is faster there, which takes seconds at most. Both give the same bits,
so that the choice changes nothing but time.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..gather import data_device, gather_integers
from .base import Exchange
from .linear import LinearExchange
from .registry import register_exchange
from .two_dimensional import TwoDimensionalExchange

logger = logging.getLogger(__name__)

# bytes that one rank hands over
_PROBES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
# rounds of measurements at a size: at least, at most, and seconds after which no other is begun
_LEAST, _MOST, _SECONDS = 9, 51, 1.0
# how much faster the hierarchical exchange has to be
_MARGIN = 0.97


@register_exchange("auto")
class AutoExchange(Exchange):
    """'linear' or '2dh' by the size of the message, as measured at the start.

    See :meth:`for_message`.

    Attributes:
        seconds: of each algorithm at the sizes that were measured; the same on every rank.
    """

    needs_nodes = True
    partitions = TwoDimensionalExchange.partitions
    unfit = TwoDimensionalExchange.unfit

    def __init__(self, groups, subgroups=None, ranks_per_node=0):
        super().__init__(groups, subgroups, ranks_per_node)
        self.linear = LinearExchange(groups)
        self.hierarchical = TwoDimensionalExchange(groups, subgroups, ranks_per_node)
        self.seconds: dict[str, list[float]] = {}

    def move(self, rows, received, leg, parts):
        """Without a size that all ranks agreed on: the linear exchange."""
        self.linear.move(rows, received, leg, parts)

    def for_message(self, num_bytes: int) -> Exchange:
        """The faster one; a collective call in the sense that all ranks must ask for one size."""
        if not self.seconds:
            return self.linear
        measured = self.seconds["linear"], self.seconds["2dh"]
        edge = crossover(*measured)
        if not edge or edge < len(_PROBES) and num_bytes >= _PROBES[edge]:
            return self.linear
        if num_bytes <= _PROBES[edge - 1]:
            return self.hierarchical
        linear, hierarchical = (interpolate(_PROBES, times, num_bytes) for times in measured)
        return self.hierarchical if hierarchical < _MARGIN * linear else self.linear

    def prepare(self) -> Exchange:
        """Measure both algorithms."""
        for size in _PROBES:
            for exchange, seconds in self._measure(size).items():
                self.seconds.setdefault(exchange, []).append(seconds)
        if self.groups.rank == 0:
            nodes, local = self.hierarchical.shape
            table = ", ".join(
                f"{size >> 10} KiB {1000 * a:.2f} / {1000 * b:.2f} ms"
                f" -> {self.for_message(size).name}"
                for size, a, b in zip(
                    _PROBES, self.seconds["linear"], self.seconds["2dh"], strict=True
                )
            )
            logger.info(
                "exchange auto, %d nodes of %d ranks, linear / 2dh by bytes per rank: %s",
                nodes,
                local,
                table,
            )
        return self

    def _measure(self, size: int) -> dict[str, float]:
        """Median seconds of each algorithm; of every round, those of the slowest rank.

        The ranks share their times after every round, and so end with the same one.
        """
        group, ranks = self.groups.ep_group, self.groups.ep_size
        device = data_device(group)
        rows = torch.zeros(ranks, -(-size // ranks), dtype=torch.uint8, device=device)
        exchanges = (self.linear, self.hierarchical)
        rounds: list[tuple[float, ...]] = []
        spent, first = 0.0, True
        while not (enough(rounds) or spent > _SECONDS and len(rounds) >= _LEAST):
            mine = []
            # by turns, as what one leaves in the links' queues hits the other
            turn = 1 if len(rounds) % 2 else -1
            for exchange in exchanges[::turn]:
                dist.barrier(group)
                _synchronize(device)
                begin = time.perf_counter_ns()
                exchange.forth(rows)
                _synchronize(device)
                mine.append(time.perf_counter_ns() - begin)
            slowest = map(max, zip(*gather_integers(mine[::turn], group), strict=True))
            seconds = tuple(1e-9 * nanoseconds for nanoseconds in slowest)
            if not first:  # which connects
                rounds.append(seconds)
                spent += sum(seconds)
            first = False
        medians = map(statistics.median, zip(*rounds, strict=True))
        return {e.name: seconds for e, seconds in zip(exchanges, medians, strict=True)}

    @classmethod
    def predict(cls, num_bytes, num_ranks, links):
        """The smaller one."""
        return min(
            kind.predict(num_bytes, num_ranks, links)
            for kind in (LinearExchange, TwoDimensionalExchange)
        )


def crossover(linear: Sequence[float], hierarchical: Sequence[float]) -> int:
    """Number of sizes, from the smallest on, at which the hierarchical exchange is to be taken.

    The ratio of two lines of which one has the smaller constant and the other the smaller slope
    falls with the size, so there is one crossing; where it lies is decided by all sizes together,
    and a single one that was measured badly has no say.
    """
    gains = [math.log(_MARGIN * a / b) for a, b in zip(linear, hierarchical, strict=True)]
    sums = [0.0, *itertools.accumulate(gains)]
    return max(range(len(sums)), key=sums.__getitem__)


def enough(rounds: Sequence[tuple[float, float]]) -> bool:
    """Whether more rounds would hardly change which algorithm the medians say is faster.

    The logarithm of the ratio is looked at round by round, in which what disturbs a machine hits
    both alike: is its median more than three standard errors from the margin? (For a median that is
    1.25 sigma over the root of n, and the middle half of the values is 1.35 sigma wide.)

    Args:
        rounds: seconds of the linear and of the hierarchical exchange.
    """
    if not _LEAST <= len(rounds) < _MOST:
        return len(rounds) >= _MOST
    ratios = [math.log(hierarchical / linear) for linear, hierarchical in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * (high - low) / 1.35 / math.sqrt(len(ratios))
    return abs(middle - math.log(_MARGIN)) > 3 * error


def interpolate(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    """Time of a size by straight lines between the measured ones, beyond them by the last two."""
    above = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
    (x0, x1), (y0, y1) = sizes[above - 1 : above + 1], seconds[above - 1 : above + 1]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
