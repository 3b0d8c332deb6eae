"""Which rank this process is: adopted from torchrun, srun or mpirun, or to be started here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Placement:
    """Where this process stands in the job.

    With ``adopted`` it is one rank itself. Otherwise it is to start ``local_world_size`` ranks, the
    first of which is ``rank`` and has local rank 0.
    """

    source: str
    adopted: bool
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self):
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{self.source}: rank {self.rank} is not below the world size {self.world_size}"
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(
                f"{self.source}: local rank {self.local_rank} is not below the number of ranks "
                f"on this node, {self.local_world_size}"
            )

    @property
    def single_node(self) -> bool:
        return self.num_nodes == 1 and self.local_world_size == self.world_size


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"environment variable {name}={env[name]!r} is not a number") from None


def _optional(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if env.get(name, "") != "":
            return _integer(env, name)
    return None


def _adopted(source: str, rank: int, world: int, local_rank: int, local_world, node, nodes):
    """A Placement with what the starter left out worked out from the rest."""
    if local_world is None:
        # One node: every rank is local. Several nodes: they are taken to be filled alike.
        local_world = world // nodes if nodes else world
    if nodes is None:
        nodes = -(-world // local_world)
    if node is None:
        node = rank // local_world
    return Placement(source, True, rank, world, local_rank, local_world, node, nodes)


def _from_torch(env: Mapping[str, str]) -> Placement | None:
    given = [name for name in _TORCH if env.get(name, "") != ""]
    if not given or given == ["LOCAL_RANK"]:
        return None
    if len(given) < len(_TORCH):
        missing = [name for name in _TORCH if name not in given]
        raise ValueError(
            f"environment variables {', '.join(given)} are set but {', '.join(missing)} not; "
            "set all three (torchrun does) or none"
        )
    return _adopted(
        "torchrun",
        _integer(env, "RANK"),
        _integer(env, "WORLD_SIZE"),
        _integer(env, "LOCAL_RANK"),
        _optional(env, "LOCAL_WORLD_SIZE"),
        _optional(env, "GROUP_RANK", "NODE_RANK"),
        _optional(env, "GROUP_WORLD_SIZE"),
    )


def _from_mpirun(env: Mapping[str, str]) -> Placement | None:
    if "OMPI_COMM_WORLD_RANK" in env:  # Open MPI
        return _adopted(
            "mpirun",
            _integer(env, "OMPI_COMM_WORLD_RANK"),
            _integer(env, "OMPI_COMM_WORLD_SIZE"),
            _integer(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
            _optional(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
            None,
            None,
        )
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:  # MPICH, Intel MPI (Hydra)
        return _adopted(
            "mpirun",
            _integer(env, "PMI_RANK"),
            _integer(env, "PMI_SIZE"),
            _integer(env, "MPI_LOCALRANKID"),
            _optional(env, "MPI_LOCALNRANKS"),
            None,
            None,
        )
    return None


def _from_srun(env: Mapping[str, str]) -> Placement | None:
    # SLURM_PROCID alone is also set in the batch script, which is no task of a step.
    if "SLURM_PROCID" not in env or not env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "")):
        return None
    node = _optional(env, "SLURM_NODEID") or 0
    nodes = _optional(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    local_world = None
    if env.get("SLURM_STEP_TASKS_PER_NODE"):
        counts = expand_tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
        if node >= len(counts):
            raise ValueError(
                f"SLURM_NODEID={node} but SLURM_STEP_TASKS_PER_NODE="
                f"{env['SLURM_STEP_TASKS_PER_NODE']} names {len(counts)} nodes"
            )
        local_world = counts[node]
    world = _optional(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if world is None:
        raise ValueError("SLURM_PROCID is set but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS")
    return _adopted(
        "srun",
        _integer(env, "SLURM_PROCID"),
        world,
        _optional(env, "SLURM_LOCALID") or 0,
        local_world,
        node,
        nodes,
    )


def _from_pmi(env: Mapping[str, str]) -> Placement | None:
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    rank, world = _integer(env, "PMI_RANK"), _integer(env, "PMI_SIZE")
    local = _optional(env, "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")
    if local is None and world > 1:
        raise ValueError(
            f"PMI_RANK={rank} and PMI_SIZE={world} are set but no local rank (MPI_LOCALRANKID, "
            "PMI_LOCAL_RANK); set LOCAL_RANK, RANK and WORLD_SIZE of this process"
        )
    return _adopted("mpirun", rank, world, local or 0, _optional(env, "PMI_LOCAL_SIZE"), None, None)


def adopt(env: Mapping[str, str]) -> Placement | None:
    """The rank that torchrun, mpirun or srun already gave this process; None if there is none.

    The innermost starter wins: mpirun and torchrun inside a SLURM allocation inherit SLURM's
    variables of the step that carries them, so theirs are read first.
    Raises ValueError for half-set or impossible variables.
    """
    for reader in (_from_torch, _from_mpirun, _from_srun, _from_pmi):
        placement = reader(env)
        if placement is not None:
            return placement
    return None


def start_here(nproc: int, num_nodes: int, node_rank: int, source: str = "launcher") -> Placement:
    """The placement of a launcher that starts ``nproc`` ranks on each of ``num_nodes`` nodes."""
    if nproc < 1 or num_nodes < 1:
        raise ValueError(f"{nproc} ranks per node on {num_nodes} nodes: both must be at least 1")
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"node rank {node_rank} is not below the number of nodes, {num_nodes}")
    return Placement(
        source, False, node_rank * nproc, num_nodes * nproc, 0, nproc, node_rank, num_nodes
    )


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks on every node from SLURM_STEP_TASKS_PER_NODE: ``2(x3),1`` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"tasks per node {text!r}: cannot read {item!r}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
