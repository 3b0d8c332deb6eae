"""Environment variables by which torchrun, MPI, SLURM and PMI tell a process its rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Starter:
    """Variables of one starter. If several names are given, the first one that is set counts."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # this starter sets one of these

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
    Starter(  # a task of a step; the batch script also has a rank
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
    """Return the value of the first name that is set, or ""."""
    return next((env[name] for name in names if env.get(name)), "")


@dataclass(frozen=True)
class Started:
    """Rank and world size of this process; (0, 1) if alone."""

    by: str
    rank: int
    world_size: int


def started(env: Mapping[str, str]) -> Started:
    """Return the place in the environment; alone if no starter states several ranks."""
    for starter in STARTERS:
        rank, world_size = env.get(starter.rank, ""), first_set(env, starter.world_size)
        if starter.is_here(env) and rank.isdigit() and world_size.isdigit() and int(world_size) > 1:
            return Started(starter.name, int(rank), int(world_size))
    return Started("", 0, 1)


def is_first_rank(env: Mapping[str, str]) -> bool:
    """Return whether this process reports errors that all ranks find."""
    return next((env[row.rank] for row in STARTERS if row.is_here(env)), "0") == "0"
