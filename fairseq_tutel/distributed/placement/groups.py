"""Placement of experts: which ranks hold which experts, as one immutable value.

W ranks form blocks of P neighbours (``ep_size``). Each block holds all E experts once, ``e = E/P``
on each rank. Tokens travel inside a block. The W/P ranks with the same position in their blocks are
replicas: they hold the same experts and average their gradients. With the placement *sliced*
instead of *replicated*, each of the S = W/E ranks of an expert holds F/S of its F hidden units:
rank s*E + j has slice s of expert j (:mod:`.slices`). ``distributed/README.md`` has examples.
"""

import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...config import EXPERT_PLACEMENTS, exchange_size
from ..world import (
    compare_settings,
    control_device,
    gather_integers,
    once_per_world,
    process_world,
    release_at_exit,
    this_machine,
)

logger = logging.getLogger(__name__)

_INTERFACE = "GLOO_SOCKET_IFNAME"
_MAX_GLOO_RANKS = 512


@dataclass(frozen=True)
class ExpertParallelGroups:
    """Placement of the experts of one layer size, with the process groups that serve it.

    Attributes:
        num_experts: E.
        rank, world_size: number of this process and of all, simulated ones in a simulation.
        ep_size: P, ranks that exchange tokens with each other.
        num_replicas: W/P, ranks that hold the same experts or slices of them.
        ep_group, replica_group: process groups; None if the size is 1 or simulated.
        control_group: ranks that agree on steps, over the CPU if possible, so that the host does
            not wait for a GPU. None: ``ep_group``; with slices the default group.
        simulated: one process plays one rank of ``world_size``; exchanges are local copies.
        placement: each rank of an expert holds all of it (``replicated``) or a slice (``sliced``).
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
        release_at_exit(self, "ep_group", "replica_group", "control_group")

    def __deepcopy__(self, memo):
        return self  # copies of a layer communicate through the same process groups

    def __reduce_ex__(self, protocol):
        """Refuse files of a whole model, which would hold one rank's experts."""
        if self.ep_group or self.replica_group:
            raise ValueError(
                f"a model on {self.world_size} ranks cannot be pickled, as by torch.save(model): "
                "use fairseq_tutel.training.save_checkpoint, or full_state_dict(model) for one "
                "file with the experts of all ranks"
            )
        return super().__reduce_ex__(protocol)

    @property
    def num_local_experts(self) -> int:
        """e, experts whose weights live on this rank."""
        return self.num_experts // self.ep_size

    @property
    def num_slices(self) -> int:
        """S, slices of each expert; 1 if experts are whole."""
        return self.num_replicas if self.placement == "sliced" else 1

    @property
    def slice_index(self) -> int:
        """s, number of the slice that this rank holds of its experts."""
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
    def needs_sync(self) -> bool:
        """Whether a forward pass involves other ranks and so needs their agreement."""
        return max(self.ep_size, self.num_slices) > 1 and not self.simulated


def build_groups(
    num_experts: int,
    *,
    expert_parallel_size: int = 0,
    simulate_world_size: int = 0,
    placement: str = "replicated",
) -> ExpertParallelGroups:
    """Build the process groups for E experts on the W ranks of the default group. Collective.

    Layers with the same arguments share the groups. Ranks compare their arguments first, because
    ranks that wait for different partners would hang.

    >>> groups = build_groups(8, simulate_world_size=4)
    >>> groups.ep_size, groups.num_local_experts, groups.local_experts
    (4, 2, range(0, 2))
    >>> build_groups(2, placement="sliced", simulate_world_size=4).num_slices
    2

    Args:
        num_experts (int): E, the experts of a layer over all ranks.
        expert_parallel_size (int): P, neighbouring ranks that exchange tokens and together hold all
            experts; divides E and W (default 0: min(E, W)).
        simulate_world_size (int): play rank 0 of this many ranks in one process if more than 1
            (default 0: off).
        placement (str): if E < W, each rank of an expert holds all of it (``replicated``, the
            default) or a slice of its hidden units (``sliced``).

    Returns:
        ExpertParallelGroups: the placement and its process groups.

    Raises:
        ValueError: E, W and P do not divide, the placement is unknown, P is chosen with slices,
            ranks differ, or a simulation has more than one process.
    """
    rank, world_size = process_world()
    simulated = simulate_world_size > 1
    if simulated:
        # allowed on the meta device: a rank of a benchmark may count a model's parameters
        if world_size > 1 and torch.get_default_device().type != "meta":
            raise ValueError(
                f"a simulation of {simulate_world_size} ranks runs in one process, not in "
                f"{world_size}"
            )
        rank, world_size = 0, simulate_world_size
    ep_size = exchange_size(num_experts, world_size, expert_parallel_size)
    groups = ExpertParallelGroups(
        num_experts,
        rank=rank,
        world_size=world_size,
        ep_size=ep_size,
        num_replicas=world_size // ep_size,
        simulated=simulated,
        placement=placement,
    )
    if placement == "sliced" and ep_size != min(num_experts, world_size):
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} (--moe-expert-parallel-size) makes "
            "groups of ranks that hold whole experts, and placement='sliced' cuts them: give one"
        )
    if simulated or world_size == 1:
        return groups
    compare_settings(
        {"num_experts": num_experts, "placement": placement, "expert_parallel_size": ep_size}
    )
    return once_per_world(("groups", groups), lambda: _with_process_groups(groups))


def _with_process_groups(groups):
    world_size, ep_size = groups.world_size, groups.ep_size
    replicas = [range(i, world_size, ep_size) for i in range(ep_size)]
    agreeing = groups.blocks if groups.num_slices == 1 else [range(world_size)]
    return dataclasses.replace(
        groups,
        ep_group=create_group(groups.blocks),
        replica_group=create_group(replicas),
        control_group=_control_group(agreeing),
    )


def _control_group(blocks: Sequence[Sequence[int]]) -> Any | None:
    """Create a gloo group beside a group that communicates from GPUs only; None if not needed.

    The ranks of a block on one machine connect over its loopback interface. Others need
    GLOO_SOCKET_IFNAME on every rank, because the host's name may resolve to an address that no
    other rank reaches. Every rank connects to every other, which takes too long for thousands.
    """
    if len(blocks[0]) == 1 or control_device() == "cpu":
        return None
    named, loopback = _INTERFACE in os.environ, _loopback()
    mine = this_machine(), dist.is_gloo_available(), named, named or loopback is not None
    everyone = gather_integers(list(map(int, mine)))
    machines, gloo, are_named, have_interface = zip(*everyone, strict=True)
    neighbours = all(len({machines[rank] for rank in block}) == 1 for block in blocks)
    reachable = all(are_named) or (neighbours and all(have_interface))
    if not all(gloo) or not reachable or len(blocks[0]) > _MAX_GLOO_RANKS:
        once_per_world("no control group", _warn_of_waiting)
        return None
    with _environment({} if named else {_INTERFACE: loopback}):
        return create_group(blocks, backend="gloo")


def _loopback() -> str | None:
    """Return the name of the machine's loopback interface; None if it is unknown."""
    names = {name for _, name in socket.if_nameindex()}
    return next(iter(names & {"lo", "lo0"}), None)


@contextlib.contextmanager
def _environment(added: Mapping[str, str | None]) -> Iterator[None]:
    """Add variables to the environment for a block: gloo reads its interface from there."""
    os.environ.update({name: value for name, value in added.items() if value is not None})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _warn_of_waiting() -> None:
    if process_world()[0] == 0:
        logger.warning(
            "the ranks communicate through NCCL alone: the host waits for the GPU in every call of "
            "an MoE layer, or once per forward pass if the layers get step=sync_step(...); "
            'init_process_group("cpu:gloo,cuda:nccl") or GLOO_SOCKET_IFNAME on every rank ends this'
        )


def create_group(partition: Sequence[Sequence[int]], backend: str | None = None) -> Any | None:
    """Create the process group of this rank's part of a partition of all ranks. Collective.

    Each group is made once, because a communicator costs GPU memory and time to connect. The whole
    world is the default group. The result is None if the parts are single ranks.
    """
    parts = tuple(tuple(part) for part in partition)
    if len(parts[0]) == 1:
        return None
    if len(parts) == 1 and backend is None:
        return dist.group.WORLD

    def create():
        # all ranks create the group of every part, in one order
        groups = {ranks: dist.new_group(list(ranks), backend=backend) for ranks in parts}
        return next(group for ranks, group in groups.items() if process_world()[0] in ranks)

    return once_per_world(("process group", parts, backend), create)
