"""Rank of this process, adopted from its starter or to be started here; where ranks meet."""

import hashlib
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..command_line.starters import STARTERS

DEFAULT_PORT = 29500  # torchrun's
# Below the kernel's range of ephemeral ports (32768 upwards), so that no outgoing connection
# of another program can hold the port by chance.
_PORT_RANGE = (15000, 32000)
# variables of schedulers and mpirun that all ranks of a job, and no other job's, have in common
_JOB_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE"),
    *("OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID", "JOB_ID"),
)


@dataclass(frozen=True)
class Placement:
    """Place of this process: one rank if ``adopted``, else the first of those that it starts."""

    source: str
    adopted: bool
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self):
        for index, count, number, limit in (
            ("rank", "world_size", self.rank, self.world_size),
            ("local_rank", "local_world_size", self.local_rank, self.local_world_size),
            ("node_rank", "num_nodes", self.node_rank, self.num_nodes),
        ):
            if not 0 <= number < limit:
                raise ValueError(f"{self.source}: {index} {number} is not below {count} {limit}")

    @property
    def single_node(self) -> bool:
        return self.num_nodes == 1 and self.local_world_size == self.world_size

    @property
    def is_task(self) -> bool:
        """Return whether a scheduler's starter, which may bind and hide GPUs, made this process."""
        return self.source in ("srun", "mpirun", "mpiexec")


def _number(env: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the value of the first variable that is set; None if there is none."""
    name = next((name for name in names if env.get(name)), None)
    if name is not None and not env[name].isdigit():
        raise ValueError(f"environment variable {name}={env[name]!r} is not a number")
    return name and int(env[name])


def adopt(env: Mapping[str, str]) -> Placement | None:
    """Return the rank that torchrun, mpirun or srun gave this process; None if there is none."""
    starter = next((each for each in STARTERS if each.is_here(env)), None)
    if starter is None:
        return None
    rank, world = _number(env, [starter.rank]), _number(env, starter.world_size)
    local, srun = _number(env, starter.local_rank), starter.name == "srun"
    node, nodes = _number(env, starter.node_rank), _number(env, starter.num_nodes)
    local_world = _number(env, starter.local_world_size)
    if world is None or (local is None and world > 1 and not srun):
        names = f"{' or '.join(starter.world_size)}, {' or '.join(starter.local_rank)}"
        raise ValueError(f"{starter.rank}={rank} is set, but not all of: {names}")
    if srun:
        node, nodes = node or 0, nodes or 1
    local_world = local_world or (world // nodes if nodes else world) or 1
    nodes = nodes or -(-world // local_world)
    node = rank // local_world if node is None else node
    return Placement(starter.name, True, rank, world, local or 0, local_world, node, nodes)


def start_here(nproc: int, num_nodes: int, node_rank: int, source: str = "launcher") -> Placement:
    """Return the place of a launcher that starts ``nproc`` ranks on each of ``num_nodes`` nodes."""
    first, world = node_rank * nproc, num_nodes * nproc
    return Placement(source, False, first, world, 0, nproc, node_rank, num_nodes)


def first_host(nodelist: str) -> str:
    """Return the first name of SLURM's list: ``node008`` of ``node[008-010,12],login``."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


def _resolvable(host: str) -> str:
    """Return ``host``, or its address in SLURM's records if the name cannot be resolved."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        match = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", host))
        return match[1] if match else host


def _scontrol(*arguments: str) -> str:
    try:
        pipes = {"capture_output": True, "text": True, "timeout": 30}
        return subprocess.run(["scontrol", *arguments], **pipes, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def master_address(placement: Placement, env: Mapping[str, str]) -> str:
    """Return the host of rank 0: MASTER_ADDR, this machine, or the first of SLURM's nodes."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if placement.single_node:
        return "127.0.0.1"
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodelist:
        return _resolvable(first_host(nodelist))
    nodes = f"{placement.num_nodes} nodes"
    raise ValueError(f"{nodes}, but the host of rank 0 is unknown: give --master-addr")


def master_port(placement: Placement, env: Mapping[str, str]) -> int:
    """Return the port on the host of rank 0: MASTER_PORT, a free one, or one from the job's id."""
    if text := env.get("MASTER_PORT"):
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise ValueError(f"MASTER_PORT={text!r} is not a port number")
        return int(text)
    if placement.single_node and not placement.adopted:  # one launcher starts every rank
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]
    job = [f"{name}={env[name]}" for name in _JOB_VARIABLES if env.get(name)]
    if not job:
        return DEFAULT_PORT
    low, high = _PORT_RANGE
    digest = hashlib.sha256("\n".join(job).encode()).digest()
    return low + int.from_bytes(digest[:8], "big") % (high - low)
