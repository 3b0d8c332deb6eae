"""Base class of exchange algorithms, and the rows that each rank sends and gets."""

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
    """Direction of an exchange: a token to its expert, the output back, and both gradients."""

    DISPATCH = "dispatch"
    COMBINE = "combine"
    DISPATCH_GRADIENT = "dispatch gradient"
    COMBINE_GRADIENT = "combine gradient"

    @property
    def outward(self) -> bool:
        """Whether rows go from the ranks that hold tokens to the ranks that hold experts."""
        return self in (Direction.DISPATCH, Direction.COMBINE_GRADIENT)

    @property
    def gradient(self) -> Direction:
        """Direction of the gradient of DISPATCH or COMBINE, which takes the reverse way."""
        return Direction(f"{self.value} gradient")


@dataclass(frozen=True)
class Splits:
    """Rows per rank of an exchange of unequal parts; COMBINE swaps the two lists."""

    sent_P: Sequence[int]  # rows that DISPATCH sends to rank p
    received_P: Sequence[int]  # rows that DISPATCH gets from rank p
    stages: Any = None  # splits of the stages, for an algorithm that has several

    def sizes(self, outward: bool) -> tuple[list[int], list[int]]:
        """Return (rows to each rank, rows from each rank) of a direction."""
        sent, received = list(self.sent_P), list(self.received_P)
        return (sent, received) if outward else (received, sent)


def chunk_edges(count: torch.Tensor, degree: int) -> torch.Tensor:
    """Return the edges of chunks: chunk c of n rows has rows n*c//d to n*(c+1)//d.

    Takes n, int64 [...], and the degree d; returns int64 [d + 1, ...].

    >>> chunk_edges(torch.tensor(5), 4).tolist()
    [0, 1, 2, 3, 5]
    """
    numbers = torch.arange(degree + 1, device=count.device)
    return count * numbers.view(-1, *[1] * count.dim()) // degree


def chunk_sizes(count: torch.Tensor, degree: int) -> torch.Tensor:
    """Return the rows of each chunk, int64 [d, ...]; see :func:`chunk_edges`."""
    return count[None] if degree == 1 else chunk_edges(count, degree).diff(dim=0)


class NetworkProfile(Protocol):
    """Numbers that decide the time of an exchange: bytes per second of one rank, and seconds."""

    gpus_per_node: int
    node_bandwidth: float
    network_bandwidth: float
    link_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    latency: float
    message_overhead: float


class ExchangeAlgorithm(abc.ABC):
    """Algorithm that moves rows between ranks.

    The sent rows are P parts, one per rank: all of one size if ``splits`` is None, otherwise of the
    sizes from :meth:`share_chunks`. DISPATCH sends part p to rank ``send_order[p]``. Rows arrive
    ordered by the sending rank. COMBINE returns rows in the order in which DISPATCH sent them. All
    ranks of ``groups.ep_group`` call the methods together.

    Args:
        groups: the placement of the experts.
        subgroups: process groups by name, as :meth:`partitions` asked for them.
        ranks_per_node: m, the ranks on every node; 0 if nodes differ.
    """

    name: str = ""
    Options: ClassVar[type[Options]] = Options  # no options of its own
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
        """Send rows and fill ``received``; no autograd.

        Args:
            rows: [n, ...] contiguous.
            received: [n', ...] of the same dtype, uninitialised.
            direction: an algorithm looks at ``direction.outward`` only.
            splits: :class:`Splits`, or None for equal parts.
        """

    @classmethod
    def partitions(cls, num_ranks: int, ranks_per_node: int) -> Mapping[str, list[list[int]]]:
        """Return the process groups that the algorithm needs besides that of all P ranks.

        Args:
            num_ranks: P.
            ranks_per_node: m, or 0 if nodes differ.

        Returns:
            Name -> partition of range(P).
        """
        return {}

    @classmethod
    def unsupported_reason(cls, num_ranks: int, ranks_per_node: int) -> str | None:
        """Return why P ranks, m per node, cannot use the algorithm; None if they can."""
        return None

    @classmethod
    def predict(cls, num_bytes: float, num_ranks: int, network: NetworkProfile) -> float:
        """Return the seconds of one exchange of equal parts.

        Args:
            num_bytes: bytes that one rank sends, including its own part.
            num_ranks: P.
            network: speed of the links.

        Raises:
            NotImplementedError: the algorithm does not predict its time.
        """
        raise NotImplementedError(f"{cls.__name__} does not predict its time")

    @property
    def send_order(self) -> list[int] | None:
        """Destination rank of each part of the sent rows; None for rank order."""
        return None

    def send_order_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rank of each part, part of each rank), int64 [P], if there is a send order."""
        if device not in self._orders:
            order_P = torch.tensor(self.send_order, device=device)
            self._orders[device] = (order_P, order_P.argsort())
        return self._orders[device]

    def share_chunks(
        self, count_E: torch.Tensor, degree: int
    ) -> list[tuple[torch.Tensor, Splits | None]]:
        """Exchange the numbers of rows per expert, and cut them into chunks.

        Both ends cut the rows of every (rank, expert) by :func:`chunk_edges`. An algorithm of
        several stages overrides this method. The host reads the sums: one synchronisation.

        ``count_E``, [E] int, are rows that this rank sends to each expert. Return for each of
        ``degree`` chunks int64 [P, e], rows from rank p for local expert j; and the splits, None if
        no rows travel.
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
    """Stand-in for the algorithm ``name`` that copies rows instead of sending them.

    For simulations and benchmarks (``skip_exchange``). Results are wrong, because a rank's own rows
    take the place of received ones.
    """

    def __init__(self, groups, name):
        super().__init__(groups)
        self.name = name

    def move(self, rows, received, direction, splits):
        received.copy_(rows)

    def _receive_counts(self, count_E):
        return count_E.view(self.groups.ep_size, -1)


def register_exchange(name: str) -> Callable[[type[ExchangeAlgorithm]], type[ExchangeAlgorithm]]:
    """Register an exchange algorithm by name; a class decorator, also for other packages.

    Layers, benchmarks, planner and tuner then accept the name. ``--moe-exchange`` accepts it if the
    class was registered before fairseq reads the command line; the first line of the class's
    docstring is its help text. Raise ValueError for a name that is taken.
    """

    def register(cls: type[ExchangeAlgorithm]) -> type[ExchangeAlgorithm]:
        EXCHANGES.register(name)(cls)
        cls.name = name
        return cls

    return register


def exchange_candidates() -> list[str]:
    """Return the exchanges that tuner and planner try, the simplest (``linear``) first."""
    return sorted(EXCHANGES, key=lambda name: (name != "linear", name))
