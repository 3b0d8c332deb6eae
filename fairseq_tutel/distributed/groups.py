"""Which ranks hold which experts, as one immutable value.

E experts on W ranks, which form blocks of P neighbours (``ep_size``). Each block holds every
expert once, ``e = E/P`` on each of its ranks; tokens travel inside a block, and the W/P ranks with
the same position in their blocks are replicas of the same experts, whose gradients are averaged. P
is as large as can be, min(E, W), unless it is chosen: as many as share a node, and tokens stay
there.

    E=8, W=4: rank 0: experts 0-1, rank 1: 2-3, ...          one exchange group {0,1,2,3}
    E=2, W=4: ranks 0,2: expert 0; ranks 1,3: expert 1       exchange {0,1} {2,3},
                                                             replicas {0,2} {1,3}
    E=8, W=4, P=2: ranks 0,2: experts 0-3; 1,3: 4-7          the same

*Sliced* instead of *replicated*, each of the S = W/E ranks of one expert holds another slice of its
hidden units, F/S of F, so that weights, gradients and optimizer state take 1/S of the memory: rank
s*E + j has slice s of expert j (:mod:`.slices`). The gradients of a slice are of all tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..config import EXPERT_PLACEMENTS, exchange_size
from .gather import control_device, gather_integers, refuse_differences
from .teardown import release_at_exit
from .world import once_per_world, process_world

_MAX_GLOO_RANKS = 512
_PROCESS_GROUPS = ("ep_group", "replica_group", "control_group")


@dataclass(frozen=True)
class ExpertParallelGroups:
    """Placement of the experts of one layer size, with the process groups that serve it.

    Attributes:
        num_experts: E.
        rank, world_size: of this process; world_size is the simulated one in a simulation.
        ep_size: P, ranks that exchange tokens with each other.
        num_replicas: ranks that hold the same experts (or slices of them), W/P.
        ep_group, replica_group: process groups, None where the size is 1 or simulated.
        control_group: the ranks of ``ep_group`` (of the world where experts are in slices) for a
            few integers that the host needs; over the CPU where that is possible, so that a GPU
            need not be waited for. None: ``ep_group`` (the default group).
        simulated: one process is one rank of ``world_size``; exchanges are local copies.
        placement: what each of the ``num_replicas`` ranks of an expert holds: all of it
            (``replicated``), or a slice of its hidden units (``sliced``).
    """

    num_experts: int
    rank: int = 0
    world_size: int = 1
    ep_size: int = 1
    num_replicas: int = 1
    ep_group: Any | None = None
    replica_group: Any | None = None
    control_group: Any | None = None
    simulated: bool = False
    placement: str = "replicated"

    def __post_init__(self):
        if self.placement not in EXPERT_PLACEMENTS:
            raise ValueError(
                f"placement={self.placement!r} is unknown; choose one of "
                f"{', '.join(EXPERT_PLACEMENTS)}"
            )
        if any(getattr(self, name) is not None for name in _PROCESS_GROUPS):
            release_at_exit(self)

    def release(self) -> None:
        """Refer to no process group any more, when the process ends."""
        for name in _PROCESS_GROUPS:
            object.__setattr__(self, name, None)

    @property
    def num_local_experts(self) -> int:
        """e, experts whose weights live on this rank."""
        return self.num_experts // self.ep_size

    @property
    def num_slices(self) -> int:
        """S, slices into which each expert is cut; 1 where experts are whole."""
        return self.num_replicas if self.placement == "sliced" else 1

    @property
    def slice_index(self) -> int:
        """s, the slice of its experts that this rank holds, of ``num_slices``."""
        return self.rank // self.ep_size if self.num_slices > 1 else 0

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
    def blocks(self) -> list[range]:
        """Global ranks of every exchange group."""
        return [range(i, i + self.ep_size) for i in range(0, self.world_size, self.ep_size)]

    @property
    def communicates(self) -> bool:
        """Whether tokens leave this process."""
        return self.ep_size > 1 and not self.simulated

    @property
    def agrees(self) -> bool:
        """Whether a forward pass takes other ranks, and so an agreement with them."""
        return max(self.ep_size, self.num_slices) > 1 and not self.simulated


def build_groups(
    num_experts: int,
    *,
    expert_parallel_size: int = 0,
    simulate_world_size: int = 0,
    placement: str = "replicated",
) -> ExpertParallelGroups:
    """Make the groups for E experts on the ranks of the default process group.

    A collective call where torch.distributed is initialised with more than one rank: every rank
    must make it, with the same arguments. The divisibility of E and W is checked before anything is
    communicated, and that all ranks have the same E, P and placement before groups are created:
    ranks that wait for different partners would hang.

    Args:
        num_experts: E.
        expert_parallel_size: P, neighbours that exchange tokens and hold all experts between them;
            a divisor of E and W. 0: min(E, W).
        simulate_world_size: if > 1, play rank 0 of that many ranks in a single process.
        placement: ``replicated`` or ``sliced``, which differ where E < W.

    Raises:
        ValueError: E, W and P do not divide, an unknown placement, P chosen where experts are in
            slices, ranks that differ in one of them, or a simulation is asked for with more than
            one process.
    """
    rank, world_size = process_world()
    if simulate_world_size > 1:
        # on the meta device a model is only counted, as a benchmark's rank may do
        if world_size > 1 and torch.get_default_device().type != "meta":
            raise ValueError(
                f"a simulation of {simulate_world_size} ranks runs in one process, not in "
                f"{world_size}"
            )
        ep_size = _ep_size(num_experts, simulate_world_size, expert_parallel_size, placement)
        return ExpertParallelGroups(
            num_experts,
            world_size=simulate_world_size,
            ep_size=ep_size,
            num_replicas=simulate_world_size // ep_size,
            simulated=True,
            placement=placement,
        )
    ep_size = _agree_on_placement(num_experts, world_size, expert_parallel_size, placement)
    return _make_groups(num_experts, rank, world_size, ep_size, placement)


def _agree_on_placement(
    num_experts: int, world_size: int, expert_parallel_size: int, placement: str
) -> int:
    """P; it, E and the placement are the same on all ranks."""
    ep_size = _ep_size(num_experts, world_size, expert_parallel_size, placement)
    if world_size > 1:
        mine = [num_experts, ep_size, EXPERT_PLACEMENTS.index(placement)]
        experts, sizes, placements = zip(*gather_integers(mine), strict=True)
        refuse_differences("the number of experts", experts)
        names = [EXPERT_PLACEMENTS[number] for number in placements]
        refuse_differences("the placement of experts", names)
        refuse_differences("expert_parallel_size", sizes)
    return ep_size


def _ep_size(num_experts: int, world_size: int, expert_parallel_size: int, placement: str) -> int:
    ep_size = exchange_size(num_experts, world_size, expert_parallel_size)
    ExpertParallelGroups(num_experts, placement=placement)  # refuses an unknown one
    if placement == "sliced" and ep_size != min(num_experts, world_size):
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} (--moe-expert-parallel-size) makes "
            "groups of ranks that hold whole experts, and placement='sliced' cuts them: give one"
        )
    return ep_size


def _make_groups(
    num_experts: int, rank: int, world_size: int, ep_size: int, placement: str
) -> ExpertParallelGroups:
    groups = ExpertParallelGroups(
        num_experts,
        rank=rank,
        world_size=world_size,
        ep_size=ep_size,
        num_replicas=world_size // ep_size,
        placement=placement,
    )
    replicas = [range(i, world_size, ep_size) for i in range(ep_size)]
    return dataclasses.replace(
        groups,
        ep_group=create_group(groups.blocks),
        replica_group=create_group(replicas),
        control_group=_control_group(
            groups.blocks if groups.num_slices == 1 else [range(world_size)]
        ),
    )


def _control_group(blocks: Sequence[Sequence[int]]) -> Any | None:
    """A gloo group beside one that communicates from GPUs alone; None where there is no need.

    Only where GLOO_SOCKET_IFNAME names on every rank the network to use (``python -m
    fairseq_tutel.launch`` sets it on a single node): gloo otherwise takes the address that the
    host's name resolves to, which on some machines no other rank reaches. Every rank connects
    to every other, which takes too long for thousands.
    """
    if len(blocks[0]) == 1 or control_device() == "cpu":
        return None
    able = dist.is_gloo_available() and "GLOO_SOCKET_IFNAME" in os.environ
    if len(blocks[0]) > _MAX_GLOO_RANKS or not all(x for (x,) in gather_integers([int(able)])):
        return None
    return create_group(blocks, backend="gloo")


def shared_groups(
    num_experts: int, placement: str = "replicated", *, expert_parallel_size: int = 0
) -> ExpertParallelGroups:
    """:func:`build_groups`, one value for all layers of the same E, P and placement. Collective."""
    rank, world_size = process_world()
    ep_size = _agree_on_placement(num_experts, world_size, expert_parallel_size, placement)
    key = ("groups", num_experts, ep_size, placement)
    make = functools.partial(_make_groups, num_experts, rank, world_size, ep_size, placement)
    return once_per_world(key, make)


def create_group(partition: Sequence[Sequence[int]], backend: str | None = None) -> Any | None:
    """The process group of this rank's part of a partition of all ranks. Collective.

    A communicator costs GPU memory and time to connect, so each is made once, and where the one
    part is the whole world, its group is taken. None where the parts are single ranks.

    Args:
        backend: of torch.distributed; that of the world if None.
    """
    parts = tuple(tuple(part) for part in partition)
    if len(parts[0]) == 1:
        return None
    if len(parts) == 1 and backend is None:
        return dist.group.WORLD
    return once_per_world(("process group", parts, backend), lambda: _create_group(parts, backend))


def _create_group(parts, backend):
    """Create the group of every part (all ranks must), return the one with this rank."""
    rank, _ = process_world()
    mine = None
    for ranks in parts:
        group = dist.new_group(list(ranks), backend=backend)
        if rank in ranks:
            mine = group
    return mine
