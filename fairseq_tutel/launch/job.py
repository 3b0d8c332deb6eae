"""Make the ranks to run on this node of the options, the environment and the machine."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import commands
from .binding import RankBinding, choose_bindings, format_table
from .commands import Command
from .devices import Gpu, has_gpu_files, visible_gpus
from .placement import Placement, adopt, master_address, master_port, start_here
from .preflight import SharedError
from .supervise import RankJob

_STARTUP = str(Path(__file__).with_name("startup"))

# NCCL settings by name; the README says what for. A variable the user has set is never changed.
NCCL_PROFILES: dict[str, dict[str, str]] = {
    "none": {},
    "ib-adaptive-routing": {"NCCL_IB_ADAPTIVE_ROUTING": "1"},
    "zero-sm": {"NCCL_CTA_POLICY": "2", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"},
}


@dataclass(frozen=True)
class Options:
    """The launcher's own options, by the names of their flags; cli.py documents them."""

    nproc_per_node: int | None = None  # None: auto
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    bind: str = "auto"
    nccl_profile: str = "none"
    output: str = "prefix"
    grace_seconds: float = 15.0
    agree_seconds: int | None = None
    dry_run: bool = False
    root: str = "/"  # of /sys, /dev and /proc; another one in tests


@dataclass(frozen=True)
class Job:
    """Ranks that this process starts, and a ``summary`` of them for the user."""

    placement: Placement
    command: Command
    ranks: list[RankJob]
    summary: str
    cpu: bool

    def report(self, *, again: bool = False) -> dict[str, Any] | None:
        """Return what this launcher tells the job's other launchers before it starts ranks.

        None if there is no other, or if a first start (not ``again``) needs no comparison: srun
        states the number of nodes, torchrun's agents have compared theirs, mpirun's is a guess.
        """
        placement, own = self.placement, len(self.ranks)
        one_each = placement.source == "srun" and placement.world_size == placement.num_nodes
        compared = again or not placement.adopted or one_each
        if placement.world_size == own or not compared:
            return None
        return {
            "node": placement.rank // own,
            "host": socket.gethostname(),
            "nodes": placement.world_size // own,
            "ranks per node": placement.local_world_size,
            "device": "cpu" if self.cpu else "cuda",
            "command": self.command.name or Path(self.command.program[0]).name,
        }

    @property
    def is_of_a_step(self) -> bool:
        """Return whether other nodes' launchers have the job's other ranks, started by one srun."""
        return self.placement.source == "srun" and self.placement.world_size > len(self.ranks)

    @property
    def trains(self) -> bool:
        """Return whether ranks hold SIGUSR1 back while they import, and may ask for a restart."""
        return self.command.name in commands.TRAINING


def _ranks_per_node(options: Options, command: Command, num_nodes: int, num_gpus: int) -> int:
    """Return ``--nproc-per-node``; auto: by the command's world size, or one per GPU, or one."""
    if options.nproc_per_node is not None:
        return options.nproc_per_node
    world_size = command.number("distributed_world_size")
    if world_size is not None and world_size > 0 and world_size % num_nodes == 0:
        return world_size // num_nodes
    return max(1, num_gpus)


def _require_equal(option: str, given: int | None, found: int, placement: Placement) -> None:
    if given is not None and given != found:
        raise ValueError(f"{option} {given} contradicts {placement.source}, which states {found}")


def place(options: Options, command: Command, env: Mapping[str, str], num_gpus: int) -> Placement:
    """Return the place of the rank that was started already, or of those to start here."""
    given = adopt(env)
    if given is None:
        num_nodes = options.nnodes or 1
        if num_nodes > 1 and options.node_rank is None:
            starters = "(or start with srun, mpirun or torchrun)"
            raise ValueError(f"--nnodes {num_nodes} needs --node-rank on every node {starters}")
        if (options.node_rank or 0) >= num_nodes:
            raise ValueError(f"--node-rank {options.node_rank} is not below --nnodes {num_nodes}")
        if int(env.get("SLURM_NNODES") or 1) > 1 and options.nnodes is None:
            raise ValueError(
                f"the SLURM job has {env['SLURM_NNODES']} nodes, but this is no task of a step: "
                "start the launcher with srun (or give --nnodes)"
            )
        nproc = _ranks_per_node(options, command, num_nodes, num_gpus)
        return start_here(nproc, num_nodes, options.node_rank or 0)
    _require_equal("--nnodes", options.nnodes, given.num_nodes, given)
    _require_equal("--node-rank", options.node_rank, given.node_rank, given)
    # a task that is alone on its node (``srun --ntasks-per-node=1``) starts that node's ranks
    alone_on_node = given.local_world_size == 1 and given.num_nodes == given.world_size
    if alone_on_node and given.source != "torchrun":
        nproc = _ranks_per_node(options, command, given.num_nodes, num_gpus)
        if nproc > 1:
            return start_here(nproc, given.num_nodes, given.node_rank, given.source)
    _require_equal("--nproc-per-node", options.nproc_per_node, given.local_world_size, given)
    return given


def assign_gpus(
    placement: Placement, gpus: Sequence[Gpu], cpu: bool, env: Mapping[str, str]
) -> list[Gpu | None]:
    """Return the GPU of every rank on this node; None for ranks on the CPU."""
    ranks = placement.local_world_size
    if cpu:
        return [None] * ranks
    if len(gpus) == 1 and ranks > 1 and placement.adopted and placement.is_task:
        # srun --gpus-per-task and scripts under mpirun show each rank its own GPU, as number 0
        return [gpus[0] if i == placement.local_rank else None for i in range(ranks)]
    if ranks > len(gpus):
        seen = env.get("CUDA_VISIBLE_DEVICES")
        why = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"
        raise ValueError(
            f"{ranks} ranks on this node but {len(gpus)} visible GPUs{why}: start fewer ranks, "
            "or use the CPU (fairseq: --cpu or common.cpu=true, others: CUDA_VISIBLE_DEVICES=)"
        )
    return list(gpus[:ranks])


def _shared_environment(
    options: Options, placement: Placement, env: Mapping[str, str], command: Command, cpu: bool
) -> dict[str, str]:
    given = dict(env)
    if options.master_addr:
        given["MASTER_ADDR"] = options.master_addr
    port = options.master_port or command.number("distributed_port") or 0
    if port > 0:
        given["MASTER_PORT"] = str(port)
    # nvidia-smi numbers the GPUs by PCI address; CUDA's own order could differ.
    defaults = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **NCCL_PROFILES[options.nccl_profile]}
    if placement.single_node and (Path(options.root) / "sys/class/net/lo").exists():
        # gloo otherwise looks up the host's own name, which need not resolve.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    if cpu:
        # huge pages for big CPU tensors, which otherwise take several times as long to fill first
        defaults["THP_MEM_ALLOC_ENABLE"] = "1"
    elif placement.world_size > 1:
        # A rank with experts has several communicators. NCCL (2.26 or newer) then orders their
        # operations as the host launched them, so that ranks do not wait for each other forever.
        defaults["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    shared = {
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node_rank),
        "MASTER_ADDR": master_address(placement, given),
        "MASTER_PORT": str(master_port(placement, given)),
        # for the record: benchmarks keep the variables of this prefix with their results
        "FAIRSEQ_TUTEL_NCCL_PROFILE": options.nccl_profile,
        **{name: env.get(name, default) for name, default in defaults.items()},
    }
    if command.kind != "script":  # silence fairseq's imports (command_line/quiet.py)
        shared["PYTHONPATH"] = os.pathsep.join(filter(None, (_STARTUP, env.get("PYTHONPATH"))))
    return shared


def _device_environment(
    command: Command, gpu: Gpu | None, gpus: Sequence[Gpu], env: Mapping[str, str]
) -> dict[str, str]:
    if gpu is None:
        # fairseq's distributed_init makes a CUDA tensor wherever there is a GPU, --cpu or not
        return {"CUDA_VISIBLE_DEVICES": ""} if gpus else {}
    if command.kind != "sharded":
        return {}
    # fairseq-generate has no --device-id in effect: it takes the first GPU it sees.
    visible = env.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[gpu.index] if visible else str(gpu.index)
    return {"CUDA_VISIBLE_DEVICES": name}


def _summary(
    placement: Placement, cpu: bool, shared: Mapping[str, str], bindings: Sequence[RankBinding]
) -> str:
    ranks, nodes = placement.world_size, placement.num_nodes
    line = (
        f"{ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]} "
        f"({'adopted from' if placement.adopted else 'started by'} {placement.source}), "
        f"{'gloo on the CPU' if cpu else 'nccl on GPUs'}, "
        f"MASTER_ADDR={shared['MASTER_ADDR']} MASTER_PORT={shared['MASTER_PORT']}"
    )
    return f"{line}\n{format_table(bindings, socket.gethostname())}"


def prepare_job(options: Options, command: Command, env: Mapping[str, str]) -> Job:
    """Return the ranks of this node, checked before a rank or a process group exists."""
    commands.check_user_dir(command)
    gpus = visible_gpus(env, options.root)
    cpu = commands.use_cpu(command, len(gpus))
    placement = place(options, command, env, 0 if cpu else len(gpus))
    try:
        commands.check_experts(command, placement.world_size)
    except ValueError as error:  # else the ranks on this node may be what is wrong
        raise SharedError(*error.args) if placement.adopted else error from None
    assigned = assign_gpus(placement, gpus, cpu, env)
    shared = _shared_environment(options, placement, env, command, cpu)
    bindings = [
        replace(bound, threads=env.get("OMP_NUM_THREADS") or bound.threads)
        for bound in choose_bindings(options.bind, placement, assigned, options.root)
    ]

    def rank_job(bound: RankBinding) -> RankJob:
        local_rank, gpu = bound.local_rank, assigned[bound.local_rank]
        rank = placement.rank + local_rank - placement.local_rank
        added = commands.rank_options(
            command,
            rank=rank,
            world_size=placement.world_size,
            device=local_rank if gpu is None else gpu.index,
            shared_node=placement.local_world_size > 1,
            cpu=cpu,
        )
        rank_env = {
            **env,
            **shared,
            **_device_environment(command, gpu, gpus, env),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "OMP_NUM_THREADS": str(bound.threads),
            "FAIRSEQ_TUTEL_BIND": bound.describe(),
        }
        prefix = f"[rank {rank}] " if options.output == "prefix" and rank > 0 else ""
        # fairseq-generate prints its results: programs look for lines that begin with H-
        prefixes = ("" if command.kind == "sharded" else prefix, prefix)
        return RankJob(rank, commands.with_options(command, added), rank_env, bound, prefixes)

    mine = [b for b in bindings if not placement.adopted or b.local_rank == placement.local_rank]
    summary = _summary(placement, cpu, shared, bindings)
    if not gpus and has_gpu_files(options.root) and "CUDA_VISIBLE_DEVICES" not in env:
        summary += "\nwarning: this machine has GPU device files, but torch lists no GPU"
    return Job(placement, command, [rank_job(b) for b in mine], summary, cpu)
