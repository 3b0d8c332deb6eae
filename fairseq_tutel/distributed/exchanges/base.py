"""What every exchange has in common; a new algorithm is a subclass with :meth:`Exchange.move`."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...registry import Options
from ..groups import ExpertParallelGroups
from ..teardown import release_at_exit


class Leg(enum.Enum):
    """One of the four ways of a row: a token to its expert, the output back, both gradients."""

    DISPATCH = "dispatch"
    COMBINE = "combine"
    DISPATCH_GRADIENT = "dispatch gradient"
    COMBINE_GRADIENT = "combine gradient"

    @property
    def outward(self) -> bool:
        """From the ranks that hold the tokens to those that hold the experts."""
        return self in (Leg.DISPATCH, Leg.COMBINE_GRADIENT)

    @property
    def gradient(self) -> Leg:
        """The leg that the gradient of a forward leg takes: the same way in reverse."""
        return {Leg.DISPATCH: Leg.DISPATCH_GRADIENT, Leg.COMBINE: Leg.COMBINE_GRADIENT}[self]


@dataclass(frozen=True)
class Parts:
    """Rows per rank of an exchange whose parts are not equal, as the DISPATCH leg sends them.

    Attributes:
        sent_W: rows to rank w.
        received_W: rows from rank w.
        steps: what an algorithm of several steps needs besides.
    """

    sent_W: Sequence[int]
    received_W: Sequence[int]
    steps: Any = None

    def splits(self, outward: bool) -> tuple[list[int], list[int]]:
        """(rows to each rank, rows from each rank) of a leg."""
        sent, received = list(self.sent_W), list(self.received_W)
        return (sent, received) if outward else (received, sent)


def chunk_edges(count: torch.Tensor, degree: int) -> torch.Tensor:
    """Where chunks begin and end: chunk c of n rows has those from n*c//d to n*(c+1)//d.

    Sizes differ by one at most, and no row is added so that they would not.

    Args:
        count: int64 [...], numbers of rows n.
        degree: d.

    Returns:
        int64 [d + 1, ...].

    Example:
        5 rows in 4 chunks: 0, 1, 2, 3, 5.
    """
    numbers = torch.arange(degree + 1, device=count.device)
    return count * numbers.view(-1, *[1] * count.dim()) // degree


def chunk_sizes(count: torch.Tensor, degree: int) -> torch.Tensor:
    """Rows of each chunk, int64 [d, ...]; see :func:`chunk_edges`."""
    return count[None] if degree == 1 else chunk_edges(count, degree).diff(dim=0)


class Links(Protocol):
    """The numbers of a hardware profile that decide how long an exchange takes.

    Bandwidths are bytes per second of one rank, times are seconds; see
    :class:`fairseq_tutel.plan.hardware.Hardware`.
    """

    gpus_per_node: int
    node_bandwidth: float
    network_bandwidth: float
    link_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    latency: float
    message_overhead: float


class Codec(Protocol):
    """How the rows of one leg are written while they travel; no autograd."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """A message [n, ...] for rows [n, ...]: as many, so that parts stay as they are."""

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Fill rows from what arrived."""


class Exchange(abc.ABC):
    """Moves the rows of tokens to the ranks of their experts (``forth``) and back (``back``).

    ``back`` undoes ``forth``, and each is the gradient of the other. Parts are equal
    (``parts=None``: dim 0 holds W parts of one size) or given by what :meth:`share_counts` or
    :meth:`parts` returned. Rows arrive ordered by the sending rank. Part p of what ``forth`` sends
    is for rank ``send_order[p]``; ``back`` returns that order.

    An instance belongs to one placement of experts; its methods are collective calls of the ranks
    of ``groups.ep_group``.

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
        if self.subgroups:
            release_at_exit(self)

    def release(self) -> None:
        """Refer to no process group any more, when the process ends."""
        self.subgroups = {}

    # what an algorithm states about itself

    @abc.abstractmethod
    def move(
        self, rows: torch.Tensor, received: torch.Tensor, leg: Leg, parts: Parts | None
    ) -> None:
        """Send rows, fill ``received``; no autograd.

        Args:
            rows: [n, ...] contiguous.
            received: [n', ...] of the same dtype, uninitialised.
            leg: decides the direction; an algorithm looks at ``leg.outward`` only.
            parts: None for equal parts.
        """

    @classmethod
    def partitions(cls, num_ranks: int, ranks_per_node: int) -> Mapping[str, list[list[int]]]:
        """Process groups that the algorithm needs besides the one of all its ranks.

        Args:
            num_ranks: W, ranks of the exchange.
            ranks_per_node: m, or 0 where the nodes are not alike.

        Returns:
            Name -> partition of range(W). All are created when the exchange is built, in this
            order on every rank.
        """
        return {}

    @classmethod
    def unfit(cls, num_ranks: int, ranks_per_node: int) -> str | None:
        """Why the algorithm cannot serve W ranks on such nodes; None if it can."""
        return None

    def prepare(self) -> Exchange:
        """Called once by all ranks with what was built; returns what the layers shall use."""
        return self

    @classmethod
    def predict(cls, num_bytes: float, num_ranks: int, links: Links) -> float:
        """Seconds of one exchange of equal parts.

        Args:
            num_bytes: that one rank hands over, its own part included.
            num_ranks: W.
        """
        raise NotImplementedError(f"{cls.__name__} does not predict its time")

    @property
    def send_order(self) -> list[int] | None:
        """Rank that each part of the sent rows is for; None for rank order."""
        return None

    # what follows from it

    def send_order_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank of each part, part of each rank), int64 [W]; only where there is a send order."""
        if device not in self._orders:
            order_W = torch.tensor(self.send_order, device=device)
            self._orders[device] = (order_W, order_W.argsort())
        return self._orders[device]

    @property
    def communicates(self) -> bool:
        """Whether rows leave this process."""
        return True

    def codec(self, leg: Leg, dtype: torch.dtype) -> Codec | None:
        """How rows of a dtype are written on a leg; None: as they are."""
        return None

    def for_message(self, num_bytes: int) -> Exchange:
        """The exchange to use for a message that all ranks have agreed to be of this size."""
        return self

    def forth(self, rows: torch.Tensor, parts: Parts | None = None) -> torch.Tensor:
        """Rows to the ranks of their experts, [n, ...] -> [n', ...]. Differentiable."""
        return _Exchange.apply(rows, self, Leg.DISPATCH, parts)

    def back(self, rows: torch.Tensor, parts: Parts | None = None) -> torch.Tensor:
        """Rows back to where ``forth`` (with the same parts) took them from. Differentiable."""
        return _Exchange.apply(rows, self, Leg.COMBINE, parts)

    def receive_buffer(
        self, rows: torch.Tensor, leg: Leg, parts: Parts | None = None
    ) -> torch.Tensor:
        """Uninitialised memory for what a leg brings."""
        num_received = rows.shape[0] if parts is None else sum(parts.splits(leg.outward)[1])
        return rows.new_empty((num_received, *rows.shape[1:]))

    def share_counts(self, count_E: torch.Tensor) -> tuple[torch.Tensor, Parts | None]:
        """Send every rank the number of rows that come to each of its experts.

        NOTE: the sums are read by the host, one synchronisation.

        Args:
            count_E: [E] int, rows that this rank sends to each expert.

        Returns:
            [W, e] int64, rows that rank w sends to local expert j, and the parts of the exchange
            (None where no rows travel).
        """
        return self.share_chunks(count_E, 1)[0]

    def share_chunks(
        self, count_E: torch.Tensor, degree: int
    ) -> list[tuple[torch.Tensor, Parts | None]]:
        """:meth:`share_counts` for rows that are sent in chunks, by the same messages.

        Both ends cut the rows of every (rank, expert) by :func:`chunk_edges`. An algorithm of
        several steps overrides this.

        Args:
            count_E: [E] int, rows that this rank sends to each expert.
            degree: d, number of chunks.

        Returns:
            of each chunk what ``share_counts`` returns of all rows.
        """
        ranks = self.groups.ep_size
        count_E = count_E.to(torch.int64)
        count_DWL = chunk_sizes(self._receive_counts(count_E), degree)
        sent_DW = chunk_sizes(count_E, degree).view(degree, ranks, -1).sum(2)
        table = torch.stack([sent_DW, count_DWL.sum(2)], 1).tolist()
        return [(count, Parts(*line)) for count, line in zip(count_DWL, table, strict=True)]

    def parts(self, sent_W: Sequence[int], received_W: Sequence[int]) -> Parts:
        """Parts of sizes that the host has, rows to and from each rank. May be collective."""
        return Parts(list(sent_W), list(received_W))

    def _receive_counts(self, count_E: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(count_E)
        dist.all_to_all_single(received, count_E.contiguous(), group=self.groups.ep_group)
        return received.view(self.groups.ep_size, -1)


class _Exchange(torch.autograd.Function):
    """One leg; the gradient of an exchange is the exchange in the other direction."""

    @staticmethod
    def forward(ctx, rows, exchange, leg, parts):
        ctx.exchange, ctx.leg, ctx.parts = exchange, leg, parts
        return _run(exchange, rows, leg, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _run(ctx.exchange, grad, ctx.leg.gradient, ctx.parts), None, None, None


def _run(exchange, rows, leg, parts):
    received = exchange.receive_buffer(rows, leg, parts)
    codec = exchange.codec(leg, rows.dtype)
    if codec is None:
        exchange.move(rows.contiguous(), received, leg, parts)
        return received
    message = codec.encode(rows)
    arrived = exchange.receive_buffer(message, leg, parts)
    exchange.move(message, arrived, leg, parts)
    codec.decode(arrived, received)
    return received


class Wrapper(Exchange):
    """An exchange around another: it defines what differs and leaves the rest to the inner one."""

    def __init__(self, inner: Exchange):
        super().__init__(inner.groups, inner.subgroups, inner.ranks_per_node)
        self.inner = inner
        self.name = inner.name

    def move(self, rows, received, leg, parts):
        """As the inner exchange."""
        self.inner.move(rows, received, leg, parts)

    @property
    def send_order(self) -> list[int] | None:
        """Of the inner exchange."""
        return self.inner.send_order

    def send_order_on(self, device):
        """Of the inner exchange, which keeps it: a wrapper may be made anew for every message."""
        return self.inner.send_order_on(device)

    @property
    def communicates(self) -> bool:
        """Of the inner exchange."""
        return self.inner.communicates

    def codec(self, leg, dtype):
        """Of the inner exchange."""
        return self.inner.codec(leg, dtype)

    def for_message(self, num_bytes: int) -> Exchange:
        """This wrapper around what the inner exchange chooses."""
        chosen = self.inner.for_message(num_bytes)
        return self if chosen is self.inner else type(self)(chosen)

    def share_counts(self, count_E):
        """As the inner exchange."""
        return self.inner.share_counts(count_E)

    def share_chunks(self, count_E, degree):
        """As the inner exchange."""
        return self.inner.share_chunks(count_E, degree)

    def parts(self, sent_W, received_W):
        """As the inner exchange."""
        return self.inner.parts(sent_W, received_W)
