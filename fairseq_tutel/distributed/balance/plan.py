"""Plan of a step: which rank computes which rows of which expert. Pure and deterministic.

All ranks know the rows of all ranks (:func:`gather_counts`), so they make the same plan without
further messages. Loads are rows. A helper gets room for the mean too, so loads of helped and
helping ranks end near it. ``distributed/README.md`` has the rule.

The rows of an expert have one order: by the rank that sends them, first its home, then the ranks
after the home, cyclically. The home computes the first rows. Every helper computes a contiguous
part; parts lie in the same cyclic order, so that many of a helper's rows are its own and do not
travel.
"""

from __future__ import annotations

import collections
import functools
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..exchanges.algorithm import Splits, chunk_sizes
from ..placement.groups import ExpertParallelGroups
from ..world import all_gather_tensor


class Move(NamedTuple):
    """Rows ``begin`` to ``end`` of an expert, which its ``helper`` computes."""

    expert: int
    home: int
    helper: int
    begin: int
    end: int


def plan_moves(
    rows_E: Sequence[int], num_ranks: int, *, tolerance: float = 1.05, min_rows: int = 1
) -> tuple[Move, ...]:
    """Share out the rows of experts; rank p is the home of experts p*e to p*e + e - 1.

    >>> plan_moves([90, 10, 0, 0], 2)  # rank 0 has 100 rows, rank 1 none
    (Move(expert=0, home=0, helper=1, begin=40, end=90),)

    Args:
        rows_E: rows of each expert from all ranks.
        num_ranks: P; divides E.
        tolerance: largest load that is left as it is, as a multiple of the mean.
        min_rows: rows that pay for moving one expert's weights to one helper. Smaller parts are not
            moved.

    Returns:
        The moves in the order of homes, experts and parts; empty if nothing needs to move. If
        ``min_rows`` hinders nothing, every load is at most ``tolerance`` times the mean, or the
        mean rounded up.
    """
    local = len(rows_E) // num_ranks
    loads_P = [sum(rows_E[p * local : (p + 1) * local]) for p in range(num_ranks)]
    target = -(-sum(loads_P) // num_ranks)
    limit = max(target, math.floor(tolerance * sum(loads_P) / num_ranks))
    if max(loads_P) <= limit:
        return ()
    parts = _parts(list(rows_E), loads_P, target, limit, min_rows)
    moves: list[Move] = []
    for expert in sorted(parts):
        moves += _in_order(expert, parts[expert], rows_E[expert], expert // local, num_ranks)
    return tuple(moves)


def _parts(left_E, loads_P, target, limit, min_rows):
    """Return the rows that each helper takes, by expert; changes ``left_E`` and ``loads_P``."""
    local = len(left_E) // len(loads_P)
    busy = [(target - load, rank) for rank, load in enumerate(loads_P) if load > limit]
    free = [(load - target, rank) for rank, load in enumerate(loads_P) if load < target]
    heapq.heapify(busy)  # the most rows above the mean first
    heapq.heapify(free)  # the most room first
    parts: dict[int, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    while busy:
        _, home = heapq.heappop(busy)
        mine = range(home * local, (home + 1) * local)
        expert = max(mine, key=left_E.__getitem__)
        room, helper = free[0]
        rows = min(loads_P[home] - target, -room, left_E[expert])
        if rows < min_rows:
            continue  # this rank stays as it is
        parts[expert][helper] += rows
        left_E[expert] -= rows
        loads_P[home] -= rows
        loads_P[helper] += rows
        if loads_P[home] > limit:
            heapq.heappush(busy, (target - loads_P[home], home))
        heapq.heappop(free)
        if loads_P[helper] < target:
            heapq.heappush(free, (loads_P[helper] - target, helper))
    return parts


def _in_order(expert, by_helper, rows, home, num_ranks):
    """Return the moves of one expert: its last rows, split among helpers in cyclic order."""
    begin, moves = rows - sum(by_helper.values()), []
    for helper in sorted(by_helper, key=lambda rank: (rank - home) % num_ranks):
        moves.append(Move(expert, home, helper, begin, begin + by_helper[helper]))
        begin = moves[-1].end
    return moves


def plan_step(
    count_PE: torch.Tensor, *, tolerance: float = 1.05, min_rows: int = 1, travel: float = 0.0
) -> BalancePlan:
    """Plan a step. The plan has no moves if they cost more than they save.

    Moves save rows of the busiest rank. They cost the weights that one home sends, and the rows
    that travel only because a helper computes them. Rows that no longer travel do not count as a
    gain, since a link may share its speed between both directions.

    ``count_PE``, int64 [P, E] on the CPU, are rows that each rank sends to each expert; ``travel``
    are rows that a rank computes while one row travels, in all exchanges of a step.
    """
    unmoved = BalancePlan(count_PE)
    rows_E, ranks = count_PE.sum(0).tolist(), len(count_PE)
    moves = plan_moves(rows_E, ranks, tolerance=tolerance, min_rows=min_rows)
    if not moves:
        return unmoved
    plan = BalancePlan(count_PE, moves)
    saved = max(unmoved.load_P) - max(plan.load_P)
    more_rows = max(0, int(plan.links_P2.max() - unmoved.links_P2.max()))
    sent = max(collections.Counter(move.home for move in moves).values())
    return plan if saved >= min_rows * sent + travel * more_rows else unmoved


def gather_counts(count_E: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """Gather every rank's rows per expert: int [E] -> int64 [P, E] on the CPU. Collective.

    The host waits for the device.
    """
    count_E = count_E.to(torch.int64).contiguous()
    count_PE = count_E.new_empty((groups.ep_size, len(count_E)))
    all_gather_tensor(count_PE.view(-1), count_E, group=groups.ep_group)
    return count_PE.cpu()


class BalancePlan:
    """Moves of a step, and the rows of every rank for every *piece*.

    A piece is an expert's part on one rank. The pieces of rank 0 come first, and so on; on each
    rank first its own e experts, then those that it helps, by number. V is the number of pieces.

    ``moves`` are those of :func:`plan_moves` for the sums of ``count_PE``, see :func:`plan_step`.

    Attributes:
        count_PV: int64 [P, V], rows of each rank for each piece.
        expert_V: int64 [V], expert of each piece.
        edges_P: P + 1 numbers; the pieces of rank p are ``edges_P[p]`` to ``edges_P[p + 1]``.
    """

    def __init__(self, count_PE: torch.Tensor, moves: Sequence[Move] = ()):
        ranks, experts = count_PE.shape
        self.moves, self.local = tuple(moves), experts // ranks
        self._count_PE = count_PE
        if not moves:
            self.edges_P = list(range(0, experts + 1, self.local))
            self.count_PV, self.expert_V = count_PE, torch.arange(experts)
            return
        pieces, self.edges_P = self._pieces()
        self.expert_V, begin_V, end_V = torch.tensor(pieces).t()
        # position of each rank's first row in the order of the expert's rows, which starts at home
        home_E = torch.arange(experts) // self.local
        order_PE = (torch.arange(ranks)[:, None] + home_E) % ranks
        sorted_PE = count_PE.gather(0, order_PE)
        first_PE = torch.empty_like(count_PE)
        first_PE.scatter_(0, order_PE, sorted_PE.cumsum(0) - sorted_PE)
        first_PV, count_PV = first_PE[:, self.expert_V], count_PE[:, self.expert_V]
        last_PV = torch.minimum(first_PV + count_PV, end_V)
        self.count_PV = (last_PV - torch.maximum(first_PV, begin_V)).clamp(min=0)
        # by expert, in the order of rows of this expert
        self._order_V = torch.tensor(sorted(range(len(pieces)), key=lambda v: pieces[v]))

    def _pieces(self):
        """Return (expert, begin, end) of all pieces, and the edges of ranks among them."""
        total_E = self._count_PE.sum(0).tolist()
        helped = collections.defaultdict(list)
        for move in self.moves:
            helped[move.helper].append((move.expert, move.begin, move.end))
            total_E[move.expert] = min(total_E[move.expert], move.begin)
        pieces, edges = [], [0]
        for rank in range(self._count_PE.shape[0]):
            own = range(rank * self.local, (rank + 1) * self.local)
            pieces += [(expert, 0, total_E[expert]) for expert in own]
            pieces += sorted(helped[rank])
            edges.append(len(pieces))
        return pieces, edges

    @functools.cached_property
    def _rows_PP(self):
        """Rows from each rank to each rank, int64 [P, P]."""
        ends_PV = torch.nn.functional.pad(self.count_PV.cumsum(1), (1, 0))
        return ends_PV[:, self.edges_P].diff(dim=1)

    @property
    def load_P(self) -> list[int]:
        """Rows that each rank computes."""
        return self._rows_PP.sum(0).tolist()

    @property
    def own_rows_P(self) -> list[int]:
        """Rows of its own experts that each rank computes."""
        rows_V = self.count_PV.sum(0)
        return [int(rows_V[first : first + self.local].sum()) for first in self.edges_P[:-1]]

    @property
    def links_P2(self) -> torch.Tensor:
        """Rows that each rank sends to other ranks and gets from them, int64 [P, 2]."""
        stay_P = self._rows_PP.diagonal()
        return torch.stack([self._rows_PP.sum(1), self._rows_PP.sum(0)], 1) - stay_P[:, None]

    def new_rows(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how a rank's rows, ordered by expert, are reordered by piece.

        Both int64 [R]: the new place of each row, and the piece of each row in the old order.
        """
        count_V = self.count_PV[rank]
        first_V = count_V.cumsum(0) - count_V
        sorted_V = count_V[self._order_V]
        shift_V = first_V[self._order_V] - (sorted_V.cumsum(0) - sorted_V)
        num_rows = int(sorted_V.sum())
        piece_R = self._order_V.repeat_interleave(sorted_V, output_size=num_rows)
        shift_R = shift_V.repeat_interleave(sorted_V, output_size=num_rows)
        return torch.arange(num_rows) + shift_R, piece_R

    def chunks(self, rank: int, degree: int) -> list[tuple[torch.Tensor, Splits]]:
        """Return what ``share_chunks`` of an exchange returns, for pieces in place of experts."""
        first, end = self.edges_P[rank : rank + 2]
        size_GPV = chunk_sizes(self.count_PV, degree)
        received_GPV = size_GPV[:, :, first:end]
        ends_GV = torch.nn.functional.pad(size_GPV[:, rank].cumsum(1), (1, 0))
        sent_GP = ends_GV[:, self.edges_P].diff(dim=1)
        table = torch.stack([sent_GP, received_GPV.sum(2)], 1).tolist()
        return [(count, Splits(*line)) for count, line in zip(received_GPV, table, strict=True)]
