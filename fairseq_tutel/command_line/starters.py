"""Variables by which torchrun, MPI, SLURM and PMI tell a process its rank; where ranks meet."""

import contextlib
import hashlib
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Below the kernel's range of ephemeral ports (32768 upwards), so that no outgoing connection
# of another program can hold the port by chance; and torchrun's.
_PORTS, DEFAULT_PORT = range(15000, 32000), 29500
# variables of schedulers and mpirun that all ranks of a job, and no other job's, have in common
_JOB_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE"),
    *("OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID", "JOB_ID"),
)


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
    """Place of a process among the ranks of its job; (0, 1) if alone."""

    by: str
    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    adopted: bool = True  # False: the first of ranks that are still to be started

    def __post_init__(self):
        for index, count in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            number, limit = getattr(self, index), getattr(self, count)
            if not 0 <= number < limit:
                raise ValueError(f"{self.by}: {index} {number} is not below {count} {limit}")


def started(env: Mapping[str, str]) -> Started:
    """Return the place in the environment; alone if no starter states several ranks."""
    for starter in STARTERS:
        rank, world_size = env.get(starter.rank, ""), first_set(env, starter.world_size)
        if starter.is_here(env) and rank.isdigit() and world_size.isdigit() and int(world_size) > 1:
            return Started(starter.name, int(rank), int(world_size))
    return Started("", 0, 1)


def full_place(env: Mapping[str, str]) -> Started | None:
    """Return the rank that the innermost starter gave this process, with its place on the node.

    None if there is none; ValueError if variables are missing, or no numbers.
    """
    starter = next((each for each in STARTERS if each.is_here(env)), None)
    if starter is None:
        return None
    rank, world = _number(env, (starter.rank,)), _number(env, starter.world_size)
    local, srun = _number(env, starter.local_rank), starter.name == "srun"
    node, nodes = _number(env, starter.node_rank), _number(env, starter.num_nodes)
    local_world = _number(env, starter.local_world_size)
    if rank is None or world is None or (local is None and world > 1 and not srun):
        names = f"{' or '.join(starter.world_size)}, {' or '.join(starter.local_rank)}"
        raise ValueError(f"{starter.rank}={rank} is set, but not all of: {names}")
    nodes = nodes or int(srun)
    local_world = local_world or (world // nodes if nodes else world) or 1
    if srun and local_world * nodes < world:
        raise ValueError(f"srun: {world} tasks on {nodes} nodes: start equally many on each node")
    node = (0 if srun else rank // local_world) if node is None else node
    nodes = nodes or -(-world // local_world)
    return Started(starter.name, rank, world, local or 0, local_world, node, nodes)


def _number(env: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the value of the first variable that is set; None if there is none."""
    text = first_set(env, names)
    if text and not text.isdigit():
        name = next(name for name in names if env.get(name))
        raise ValueError(f"environment variable {name}={text!r} is not a number")
    return int(text) if text else None


def first_host(nodelist: str) -> str:
    """Return the first name of SLURM's list: ``node008`` of ``node[008-010,12],login``."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


def master_address(place: Started, env: Mapping[str, str]) -> str:
    """Return the host of rank 0: MASTER_ADDR, this machine, or the first of SLURM's nodes."""
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if env.get("MASTER_ADDR") or place.num_nodes == 1:
        return env.get("MASTER_ADDR") or "127.0.0.1"
    if not nodelist:
        nodes = f"{place.num_nodes} nodes"
        raise ValueError(f"{nodes}, but the host of rank 0 is unknown: give --master-addr")
    host = first_host(nodelist)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        try:
            socket.getaddrinfo(host, None)
        except OSError:  # SLURM may know more than the resolver
            words = ["scontrol", "show", "node", host]
            said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
            found = re.search(r"\bNodeAddr=(\S+)", said.stdout)
            return found[1] if found else host
    return host


def master_port(place: Started, env: Mapping[str, str]) -> int:
    """Return the port on the host of rank 0: MASTER_PORT, a free one, or one from the job's id."""
    if text := env.get("MASTER_PORT"):
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise ValueError(f"MASTER_PORT={text!r} is not a port number")
        return int(text)
    if place.num_nodes == 1 and not place.adopted:  # one launcher starts every rank
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return probe.getsockname()[1]
    job = "\n".join(f"{name}={env[name]}" for name in _JOB_VARIABLES if env.get(name))
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big")
    return _PORTS[digest % len(_PORTS)] if job else DEFAULT_PORT


def end_step(env: Mapping[str, str]) -> None:
    """End the ranks on all nodes of an srun, which would let them wait for the one that died."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    alone = env.get("SLURM_STEP_NUM_TASKS") in (None, "1")
    if step and "SLURM_JOB_ID" in env and not alone and shutil.which("scancel"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # keep the rank's own exit code
        words = ["scancel", "--signal=TERM", f"{env['SLURM_JOB_ID']}.{step}"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # a busy controller
            subprocess.run(words, timeout=30, check=False)
