"""Who may have started this process as one of several, and by which variables it is told its place.

The one table of torchrun's, Open MPI's, MPICH's, SLURM's and PMI's names (standard library only).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Starter:
    """Names of variables, by a command; of several the first that is set counts."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # one of these is set where this is the starter

    def is_here(self, env: Mapping[str, str]) -> bool:
        """Return whether this starter has given the process a rank."""
        return bool(env.get(self.rank) and (not self.needs or first_set(env, self.needs)))


# the innermost first: mpirun and torchrun inherit the variables of the SLURM step that carries them
STARTERS = (
    Starter(
        "torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",),
        ("GROUP_RANK", "NODE_RANK"), ("GROUP_WORLD_SIZE",),
    ),
    Starter(  # Open MPI
        "mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Starter(  # MPICH, Intel MPI (Hydra)
        "mpirun", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",),
        needs=("MPI_LOCALRANKID",),
    ),
    Starter(  # a task of a step: the batch script has a rank, too
        "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (),
        ("SLURM_NODEID",), ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        needs=("SLURM_STEP_ID", "SLURM_STEPID"),
    ),
    Starter(
        "mpiexec", "PMI_RANK", ("PMI_SIZE",), ("PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("PMI_LOCAL_SIZE",),
    ),
)  # fmt: skip


def first_set(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The value of the first name that is set, "" where none is."""
    return next((env[name] for name in names if env.get(name)), "")


@dataclass(frozen=True)
class Started:
    """The place that whoever started this process gave it among several; (0, 1) if alone."""

    by: str
    rank: int
    world_size: int


def started(env: Mapping[str, str]) -> Started:
    """Return the place that the environment states; alone if no starter states several ranks."""
    for starter in STARTERS:
        rank, world_size = env.get(starter.rank, ""), first_set(env, starter.world_size)
        if starter.is_here(env) and rank.isdigit() and world_size.isdigit() and int(world_size) > 1:
            return Started(starter.name, int(rank), int(world_size))
    return Started("", 0, 1)


def is_first_rank(env: Mapping[str, str]) -> bool:
    """Return whether this process is the one to report what all ranks find."""
    return next((env[row.rank] for row in STARTERS if row.is_here(env)), "0") == "0"
