"""MASTER_ADDR and MASTER_PORT: where the ranks meet."""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from .placement import Placement

DEFAULT_PORT = 29500  # torchrun's
# Below the kernel's range of ephemeral ports (32768 upwards), so that no outgoing connection
# of another program can hold the port by chance.
_PORT_RANGE = (15000, 32000)
# What names the job for all of its ranks and no other job's: the scheduler's or mpirun's.
_JOB_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PBS_JOBID",
    "LSB_JOBID",
    "JOB_ID",
)


def _scontrol(*arguments: str) -> str | None:
    if shutil.which("scontrol") is None:
        return None
    try:
        result = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def first_host(nodelist: str) -> str:
    """The first name of SLURM's compact list: ``node008`` of ``node[008-010,12],login``."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


def _resolvable(host: str) -> str:
    """``host``, or its address in SLURM's records if this machine cannot resolve the name."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        match = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", host) or "")
        return match[1] if match else host


def master_address(placement: Placement, env: Mapping[str, str]) -> str:
    """The host of rank 0: given by the environment, local, or the first of SLURM's node list.

    Raises ValueError where the ranks span nodes and the host of rank 0 is unknown.
    """
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if placement.single_node:
        return "127.0.0.1"
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodelist:
        return _resolvable(first_host(nodelist))
    raise ValueError(
        f"{placement.world_size} ranks on {placement.num_nodes} nodes, but the host of "
        "rank 0 is unknown: give --master-addr or set MASTER_ADDR"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def master_port(placement: Placement, env: Mapping[str, str]) -> int:
    """MASTER_PORT of the environment, else a free port (one launcher starts every rank), else one
    that every rank derives alike from the job's id, else torchrun's default."""
    if env.get("MASTER_PORT"):
        text = env["MASTER_PORT"]
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise ValueError(f"MASTER_PORT={text!r} is not a port number")
        return int(text)
    if placement.single_node and not placement.adopted:
        return _free_port()
    job = [f"{name}={env[name]}" for name in _JOB_VARIABLES if env.get(name)]
    if not job:
        return DEFAULT_PORT
    low, high = _PORT_RANGE
    digest = hashlib.sha256("\n".join(job).encode()).digest()
    return low + int.from_bytes(digest[:8], "big") % (high - low)


def check_port_free(placement: Placement, port: int) -> None:
    """On rank 0, which will listen there: raises ValueError if another program does already.

    torchrun's own agent listens on its port, and its ranks connect to that.
    """
    if placement.rank != 0 or placement.source == "torchrun":
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"port {port} of rank 0's host is taken ({error.strerror}): give --master-port "
                "or set MASTER_PORT to another on every rank"
            ) from None
