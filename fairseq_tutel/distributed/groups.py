"""Which ranks hold which experts, as one immutable value.

E experts on W ranks. If E >= W every rank holds ``e = E/W`` of them and all ranks exchange tokens
with all (``ep_size = W``). If E < W the ranks form W/E blocks of E neighbours; each block holds
every expert once, tokens travel inside a block (``ep_size = E``), and the W/E ranks with the same
position in their blocks are replicas of one expert, whose gradients are averaged.

    E=8, W=4: rank 0: experts 0-1, rank 1: 2-3, ...          one exchange group {0,1,2,3}
    E=2, W=4: ranks 0,2: expert 0; ranks 1,3: expert 1       exchange {0,1} {2,3}, replicas {0,2}
    {1,3}
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..config import check_divisible
from .control import gather_integers, refuse_differences

# Default process group -> number of experts -> groups; gone with the process group.
_shared: weakref.WeakKeyDictionary[Any, dict[int, ExpertParallelGroups]] = (
    weakref.WeakKeyDictionary()
)


def process_world() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) where no process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@dataclass(frozen=True)
class ExpertParallelGroups:
    """Placement of the experts of one layer size, with the process groups that serve it.

    Attributes:
        num_experts: E.
        rank, world_size: of this process; world_size is the simulated one in a simulation.
        ep_size: ranks that exchange tokens with each other, min(E, W).
        num_replicas: ranks that hold the same experts, 1 unless E < W.
        ep_group, replica_group: process groups, None where the size is 1 or simulated.
        simulated: one process plays one rank of ``world_size``; exchanges are local copies.
    """

    num_experts: int
    rank: int = 0
    world_size: int = 1
    ep_size: int = 1
    num_replicas: int = 1
    ep_group: Any | None = None
    replica_group: Any | None = None
    simulated: bool = False

    @property
    def num_local_experts(self) -> int:
        """e, experts whose weights live on this rank."""
        return self.num_experts // self.ep_size

    @property
    def ep_rank(self) -> int:
        """Position of this rank in its exchange group."""
        return self.rank % self.ep_size

    @property
    def local_experts(self) -> range:
        """Global indices of the experts on this rank."""
        first = self.ep_rank * self.num_local_experts
        return range(first, first + self.num_local_experts)

    @property
    def communicates(self) -> bool:
        """Whether tokens leave this process."""
        return self.ep_size > 1 and not self.simulated


def build_groups(num_experts: int, *, simulate_world_size: int = 0) -> ExpertParallelGroups:
    """Make the groups for E experts on the ranks of the default process group.

    A collective call where torch.distributed is initialised with more than one rank: every rank
    must make it, with the same arguments. The divisibility of E and W is checked before anything is
    communicated, and that all ranks have the same E before groups are created: ranks that wait for
    different partners would hang.

    Args:
        num_experts: E.
        simulate_world_size: if > 1, play rank 0 of that many ranks in a single process.

    Raises:
        ValueError: E and W do not divide, ranks have different E, or a simulation is asked for with
            more than one process.
    """
    rank, world_size = process_world()
    if simulate_world_size > 1:
        if world_size > 1:
            raise ValueError(
                f"a simulation of {simulate_world_size} ranks runs in one process, not in "
                f"{world_size}"
            )
        check_divisible(num_experts, simulate_world_size)
        return ExpertParallelGroups(
            num_experts,
            world_size=simulate_world_size,
            ep_size=min(num_experts, simulate_world_size),
            num_replicas=max(1, simulate_world_size // num_experts),
            simulated=True,
        )
    _agree_on_experts(num_experts, world_size)
    return _make_groups(num_experts, rank, world_size)


def _agree_on_experts(num_experts: int, world_size: int) -> None:
    check_divisible(num_experts, world_size)
    if world_size > 1:
        counts = [row[0] for row in gather_integers([num_experts])]
        refuse_differences("the number of experts", counts)


def _make_groups(num_experts: int, rank: int, world_size: int) -> ExpertParallelGroups:
    ep_size = min(num_experts, world_size)
    blocks = [range(i, i + ep_size) for i in range(0, world_size, ep_size)]
    replicas = [range(i, world_size, ep_size) for i in range(ep_size)]
    return ExpertParallelGroups(
        num_experts,
        rank=rank,
        world_size=world_size,
        ep_size=ep_size,
        num_replicas=world_size // ep_size,
        ep_group=_my_group(blocks, rank),
        replica_group=_my_group(replicas, rank),
    )


def shared_groups(num_experts: int) -> ExpertParallelGroups:
    """:func:`build_groups`, with one set of process groups for all layers of the same E.

    A communicator costs GPU memory and time to connect. Every call is collective.
    """
    rank, world_size = process_world()
    _agree_on_experts(num_experts, world_size)
    if world_size == 1:
        return _make_groups(num_experts, rank, world_size)
    by_count = _shared.setdefault(dist.group.WORLD, {})
    if num_experts not in by_count:
        by_count[num_experts] = _make_groups(num_experts, rank, world_size)
    return by_count[num_experts]


def _my_group(partition, rank):
    """Create every group of a partition (all ranks must), return the one with this rank."""
    if len(partition[0]) == 1:
        return None
    mine = None
    for ranks in partition:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine = group
    return mine
