"""What an algorithm of an exchange states about itself; a new one is a subclass in one file."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from ...config import EXCHANGES, Options
from ..placement.groups import ExpertParallelGroups
from ..world import release_at_exit


class Direction(enum.Enum):
    """One of the four ways of a row: a token to its expert, the output back, both gradients."""

    DISPATCH = "dispatch"
    COMBINE = "combine"
    DISPATCH_GRADIENT = "dispatch gradient"
    COMBINE_GRADIENT = "combine gradient"

    @property
    def outward(self) -> bool:
        """From the ranks that hold the tokens to those that hold the experts."""
        return self in (Direction.DISPATCH, Direction.COMBINE_GRADIENT)

    @property
    def gradient(self) -> Direction:
        """The direction that the gradient of DISPATCH or COMBINE takes: the same way in reverse."""
        return Direction(f"{self.value} gradient")


@dataclass(frozen=True)
class Splits:
    """Rows per rank of an exchange of unequal parts, as the DISPATCH direction sends them."""

    sent_P: Sequence[int]  # rows to rank p
    received_P: Sequence[int]  # rows from rank p
    stages: Any = None  # what an algorithm of several stages needs besides

    def sizes(self, outward: bool) -> tuple[list[int], list[int]]:
        """(rows to each rank, rows from each rank) of a direction."""
        sent, received = list(self.sent_P), list(self.received_P)
        return (sent, received) if outward else (received, sent)


def chunk_edges(count: torch.Tensor, degree: int) -> torch.Tensor:
    """Where chunks begin and end: chunk c of n rows has those from n*c//d to n*(c+1)//d.

    ``count``: n, int64 [...]; degree d. Returns int64 [d + 1, ...]: of 5 rows in 4 chunks the edges
    0, 1, 2, 3, 5.
    """
    numbers = torch.arange(degree + 1, device=count.device)
    return count * numbers.view(-1, *[1] * count.dim()) // degree


def chunk_sizes(count: torch.Tensor, degree: int) -> torch.Tensor:
    """Rows of each chunk, int64 [d, ...]; see :func:`chunk_edges`."""
    return count[None] if degree == 1 else chunk_edges(count, degree).diff(dim=0)


class NetworkProfile(Protocol):
    """What decides how long an exchange takes: bytes per second of one rank, seconds."""

    gpus_per_node: int
    node_bandwidth: float
    network_bandwidth: float
    link_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    latency: float
    message_overhead: float


class ExchangeAlgorithm(abc.ABC):
    """How rows travel between ranks.

    Parts are equal (``splits=None``: dim 0 holds P parts of one size) or given by
    :meth:`share_chunks`. Rows arrive ordered by the sending rank; part p of what DISPATCH sends is
    for rank ``send_order[p]``, and COMBINE returns that order. Methods are collective calls of the
    ranks of ``groups.ep_group``.

    Args:
        groups: the placement.
        subgroups: the process groups that the class asked for in :meth:`partitions`, by name.
        ranks_per_node: m, of nodes that all have as many; 0 where the nodes are not alike.
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type[Options]] = Options  # none of its own
    needs_nodes: ClassVar[bool] = False  # whether it needs the number of ranks per node

    def __init__(
        self,
        groups: ExpertParallelGroups,
        subgroups: Mapping[str, Any] | None = None,
        ranks_per_node: int = 0,
    ):
        self.groups = groups
        self.subgroups = dict(subgroups or {})
        self.ranks_per_node = ranks_per_node
        self._orders: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        release_at_exit(self, "subgroups")

    @abc.abstractmethod
    def move(
        self, rows: torch.Tensor, received: torch.Tensor, direction: Direction, splits: Any
    ) -> None:
        """Send rows, fill ``received``; no autograd.

        Args:
            rows: [n, ...] contiguous.
            received: [n', ...] of the same dtype, uninitialised.
            direction: an algorithm looks at ``direction.outward`` only.
            splits: :class:`Splits`, or None for equal parts.
        """

    @classmethod
    def partitions(cls, num_ranks: int, ranks_per_node: int) -> Mapping[str, list[list[int]]]:
        """Process groups that the algorithm needs besides the one of all its ranks.

        Args:
            num_ranks: P.
            ranks_per_node: m, or 0 where the nodes are not alike.

        Returns:
            Name -> partition of range(P).
        """
        return {}

    @classmethod
    def unsupported_reason(cls, num_ranks: int, ranks_per_node: int) -> str | None:
        """Why the algorithm cannot serve P ranks on such nodes; None if it can."""
        return None

    @classmethod
    def predict(cls, num_bytes: float, num_ranks: int, network: NetworkProfile) -> float:
        """Seconds of one exchange of equal parts.

        Args:
            num_bytes: that one rank hands over, its own part included.
            num_ranks: P.
        """
        raise NotImplementedError(f"{cls.__name__} does not predict its time")

    @property
    def send_order(self) -> list[int] | None:
        """Rank that each part of the sent rows is for; None for rank order."""
        return None

    def send_order_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank of each part, part of each rank), int64 [P]; only where there is a send order."""
        if device not in self._orders:
            order_P = torch.tensor(self.send_order, device=device)
            self._orders[device] = (order_P, order_P.argsort())
        return self._orders[device]

    def share_chunks(
        self, count_E: torch.Tensor, degree: int
    ) -> list[tuple[torch.Tensor, Splits | None]]:
        """Send every rank the number of rows that come to each of its experts, chunk by chunk.

        Both ends cut the rows of every (rank, expert) by :func:`chunk_edges`. An algorithm of
        several stages overrides this.

        NOTE: the sums are read by the host, one synchronisation.

        Args:
            count_E: [E] int, rows that this rank sends to each expert.
            degree: d, number of chunks.

        Returns:
            of each chunk [P, e] int64, rows that rank p sends to local expert j, and the splits
            (None where no rows travel).
        """
        if self.groups.ep_size == 1:
            return [(count_E[None], None)]
        count_E = count_E.to(torch.int64)
        count_GPe = chunk_sizes(self._receive_counts(count_E), degree)
        sent_GP = chunk_sizes(count_E, degree).view(degree, self.groups.ep_size, -1).sum(2)
        table = torch.stack([sent_GP, count_GPe.sum(2)], 1).tolist()
        return [(count, Splits(*line)) for count, line in zip(count_GPe, table, strict=True)]

    def _receive_counts(self, count_E: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(count_E)
        dist.all_to_all_single(received, count_E.contiguous(), group=self.groups.ep_group)
        return received.view(self.groups.ep_size, -1)


class LocalCopy(ExchangeAlgorithm):
    """Copies as many bytes as another algorithm would send; gradients are copied, too.

    For simulations and benchmarks without communication (``--dummy-a2a``); the results are wrong: a
    rank's own rows take the place of those it would receive. ``name``: of the other algorithm.
    """

    def __init__(self, groups, name):
        super().__init__(groups)
        self.name = name

    def move(self, rows, received, direction, splits):
        received.copy_(rows)

    def _receive_counts(self, count_E):
        return count_E.view(self.groups.ep_size, -1)


def register_exchange(name: str) -> Callable[[type[ExchangeAlgorithm]], type[ExchangeAlgorithm]]:
    """Class decorator that makes an exchange known by a name; also from outside the package.

    The name is then a choice of layers, benchmarks, planner, tuner and, if it was registered before
    fairseq reads the command line, of ``--moe-a2a``; the docstring's first line is its help.

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[ExchangeAlgorithm]) -> type[ExchangeAlgorithm]:
        EXCHANGES.register(name)(cls)
        cls.name = name
        return cls

    return register


def exchange_candidates() -> list[str]:
    """The exchanges that tuner and planner try, the simplest (``linear``) first."""
    return sorted(EXCHANGES, key=lambda name: (name != "linear", name))
