"""Whichever of the linear and the hierarchical exchange is faster for a message of its size.

In the cost model (``predict``) both cost a constant (latency, messages) and a time per byte: the
hierarchical one has the smaller constant, the linear one the smaller time per byte. Where the two
lines cross depends on machine and ranks; users of Tutel's 2DH lose speed with it below some hundred
GPUs (microsoft/tutel issue 214). So the lines are measured when the exchange is built, which takes
seconds at most. Both give the same bits, so that the choice changes nothing but time.
"""

from __future__ import annotations

import bisect
import logging
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

# bytes that one rank hands over -> measurements
_PROBES = {8 << 10: 7, 64 << 10: 7, 512 << 10: 5, 4 << 20: 3}
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
        linear, hierarchical = (
            interpolate(list(_PROBES), self.seconds[name], num_bytes) for name in ("linear", "2dh")
        )
        return self.hierarchical if hierarchical < _MARGIN * linear else self.linear

    def prepare(self) -> Exchange:
        """Measure both algorithms."""
        for size, repetitions in _PROBES.items():
            for exchange, seconds in self._measure(size, repetitions).items():
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

    def _measure(self, size: int, repetitions: int) -> dict[str, float]:
        """Median seconds of each algorithm on the slowest rank."""
        group, ranks = self.groups.ep_group, self.groups.ep_size
        device = data_device(group)
        rows = torch.zeros(ranks, -(-size // ranks), dtype=torch.uint8, device=device)
        exchanges = {exchange.name: exchange for exchange in (self.linear, self.hierarchical)}
        found = {name: [] for name in exchanges}
        for _ in range(repetitions + 1):
            for name, exchange in exchanges.items():
                dist.barrier(group)
                _synchronize(device)
                begin = time.perf_counter_ns()
                exchange.forth(rows)
                _synchronize(device)
                found[name].append(time.perf_counter_ns() - begin)
        mine = [int(statistics.median(times[1:])) for times in found.values()]  # first: connects
        slowest = [max(column) for column in zip(*gather_integers(mine, group), strict=True)]
        return {name: 1e-9 * time_ns for name, time_ns in zip(found, slowest, strict=True)}

    @classmethod
    def predict(cls, num_bytes, num_ranks, links):
        """The smaller one."""
        return min(
            kind.predict(num_bytes, num_ranks, links)
            for kind in (LinearExchange, TwoDimensionalExchange)
        )


def interpolate(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    """Time of a size by straight lines between the measured ones, beyond them by the last two."""
    above = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
    (x0, x1), (y0, y1) = sizes[above - 1 : above + 1], seconds[above - 1 : above + 1]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
