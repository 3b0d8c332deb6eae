"""Make the ranks to run on this node of the options, the environment and the machine."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..command_line import STARTUP
from ..command_line.starters import Started, full_place, master_address, master_port
from . import commands
from .commands import Command
from .machine import Gpu, choose_bindings, has_gpu_files, visible_gpus

# NCCL settings by name; the README says what for. A variable the user has set is never changed.
NCCL_PROFILES: dict[str, dict[str, str]] = {
    "none": {},
    "ib-adaptive-routing": {"NCCL_IB_ADAPTIVE_ROUTING": "1"},
    "zero-sm": {"NCCL_CTA_POLICY": "2", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"},
}


@dataclass(frozen=True)
class Rank:
    """Command of a rank and its surroundings, which a process takes on (entry.py)."""

    argv: list[str]
    env: dict[str, str]  # beside the launcher's own
    cpus: list[int] | None  # None: any
    holds_requests: bool  # SIGUSR1 waits until the trainer asks for it


@dataclass(frozen=True)
class Job:
    """Ranks that this process starts, or the one that was ``adopted``."""

    place: Started  # of the first rank
    adopted: bool
    ranks: list[Rank]
    role: str  # what all nodes must have in common
    summary: str
    prints_results: bool  # to standard output, where programs look for lines that begin with H-


def find_place(
    options: Namespace, command: Command, env: Mapping[str, str], num_gpus: int
) -> tuple[Started, bool]:
    """Return the rank that was started already, and True; or the first to start here, and False."""
    given, nodes, node = full_place(env), options.nnodes or 1, options.node_rank or 0
    source = given.by if given else "launcher"
    if given:
        nodes, node = given.num_nodes, given.node_rank
    elif nodes > 1 and options.node_rank is None:
        starters = "(or start with srun, mpirun or torchrun)"
        raise ValueError(f"--nnodes {nodes} needs --node-rank on every node {starters}")
    elif int(env.get("SLURM_NNODES") or 1) > 1 and options.nnodes is None:
        raise ValueError(
            f"the SLURM job has {env['SLURM_NNODES']} nodes, but this is no task of a step: "
            "start the launcher with srun (or give --nnodes)"
        )
    # auto: by the command's world size, or one per GPU, or one
    size = command.number("distributed_world_size") or 0
    stated = size // nodes if size > 0 and size % nodes == 0 else num_gpus
    nproc = options.nproc_per_node or max(1, stated)
    place, adopted = Started(source, node * nproc, nodes * nproc, 0, nproc, node, nodes), False
    # a task that is alone on its node (``srun --ntasks-per-node=1``) starts that node's ranks
    alone = given and given.local_world_size == 1 and given.world_size == nodes
    if given and not (alone and nproc > 1 and source != "torchrun"):
        place, adopted = given, True
    for option, wanted, stands in (
        ("--nnodes", options.nnodes, place.num_nodes),
        ("--node-rank", options.node_rank, place.node_rank),
        ("--nproc-per-node", options.nproc_per_node, place.local_world_size),
    ):
        if wanted not in (None, stands):
            raise ValueError(f"{option} {wanted} contradicts {source}, which states {stands}")
    return place, adopted


def _assign_gpus(place: Started, adopted: bool, gpus: Sequence[Gpu], env: Mapping[str, str]):
    """Return the GPU of every rank on this node, None for those that this process cannot see."""
    ranks, seen = place.local_world_size, env.get("CUDA_VISIBLE_DEVICES")
    if len(gpus) == 1 and ranks > 1 and adopted and place.by != "torchrun":
        # srun --gpus-per-task and scripts under mpirun show each rank its own GPU, as number 0
        return [gpus[0] if i == place.local_rank else None for i in range(ranks)]
    if ranks > len(gpus):
        why = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"
        raise ValueError(
            f"{ranks} ranks on this node but {len(gpus)} visible GPUs{why}: start fewer ranks, "
            "or use the CPU (fairseq: --cpu or common.cpu=true, others: CUDA_VISIBLE_DEVICES=)"
        )
    return gpus[:ranks]


def _defaults(options: Namespace, place: Started, cpu: bool) -> dict[str, str]:
    """Return variables for the ranks, of which those that the user has set win."""
    # nvidia-smi numbers the GPUs by PCI address; CUDA's own order could differ.
    found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **NCCL_PROFILES[options.nccl_profile]}
    if place.num_nodes == 1 and (Path(options.root) / "sys/class/net/lo").exists():
        # gloo otherwise looks up the host's own name, which need not resolve.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    if cpu:
        # huge pages for big CPU tensors, which otherwise take several times as long to fill first
        found["THP_MEM_ALLOC_ENABLE"] = "1"
    elif place.world_size > 1:
        # A rank with experts has several communicators. NCCL (2.26 or newer) then orders their
        # operations as the host launched them, so that ranks do not wait for each other forever.
        found["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    return found


def _shared_environment(
    options: Namespace, command: Command, place: Started, adopted: bool, env: Mapping[str, str]
) -> dict[str, str]:
    port = options.master_port or command.number("distributed_port") or 0
    given = {"MASTER_ADDR": options.master_addr, "MASTER_PORT": str(port) if port > 0 else None}
    given = {**env, **{name: value for name, value in given.items() if value}}
    shared = {
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": master_address(place, given),
        "MASTER_PORT": str(master_port(place, given, free=not adopted)),
        # for the record: benchmarks keep the variables of this prefix with their results
        "FAIRSEQ_TUTEL_NCCL_PROFILE": options.nccl_profile,
    }
    if command.kind != "script":  # silence fairseq's imports (command_line/quiet.py)
        shared["PYTHONPATH"] = os.pathsep.join(filter(None, (STARTUP, env.get("PYTHONPATH"))))
    return shared


def _visible_devices(
    command: Command, gpu: Gpu | None, gpus: Sequence[Gpu], env: Mapping[str, str]
) -> dict[str, str]:
    name, seen = "CUDA_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES")
    if gpu is None:
        # fairseq's distributed_init makes a CUDA tensor wherever there is a GPU, --cpu or not
        return {name: ""} if gpus else {}
    # fairseq-generate has no --device-id in effect: it takes the first GPU it sees.
    own = seen.split(",")[gpu.index] if seen else str(gpu.index)
    return {name: own} if command.kind == "sharded" else {}


def prepare_job(options: Namespace, command: Command, env: Mapping[str, str]) -> Job:
    """Return the ranks of this node, checked before a rank or a process group exists."""
    commands.check_user_dir(command)
    gpus = visible_gpus(env, options.root)
    cpu = commands.use_cpu(command, len(gpus))
    place, adopted = find_place(options, command, env, 0 if cpu else len(gpus))
    ranks = place.local_world_size
    assigned = [None] * ranks if cpu else _assign_gpus(place, adopted, gpus, env)
    shared = _shared_environment(options, command, place, adopted, env)
    shared |= {k: env.get(k, v) for k, v in _defaults(options, place, cpu).items()}
    mine = place.local_rank if adopted else None
    bindings = choose_bindings(options.bind, assigned, options.root, mine, place.by)
    device, threads = "gloo on the CPU" if cpu else "nccl on GPUs", env.get("OMP_NUM_THREADS")
    bindings = [replace(bound, threads=threads or bound.threads) for bound in bindings]
    made, lines = [], [_summary(place, adopted, device, shared)]
    for bound in bindings:
        local_rank, gpu = bound.local_rank, bound.gpu
        what = "" if gpu is None else f"GPU {gpu.index} ({gpu.pci_id or '?'}), "
        lines.append(f"  local rank {local_rank}: {what}{bound}, {bound.threads} threads")
        if mine in (None, local_rank):
            number = place.rank + local_rank - place.local_rank
            added = commands.rank_options(
                command,
                rank=number,
                world_size=place.world_size,
                device=local_rank if gpu is None else gpu.index,
                shared_node=ranks > 1,
                cpu=cpu,
            )
            own = {
                "RANK": str(number),
                "LOCAL_RANK": str(local_rank),
                "OMP_NUM_THREADS": str(bound.threads),
                "FAIRSEQ_TUTEL_BIND": str(bound),
            }
            own |= {**shared, **_visible_devices(command, gpu, gpus, env)}
            words, holds = commands.with_options(command, added), command.name in commands.TRAINING
            made.append(Rank(words, own, bound.cpus, holds))
    if not gpus and has_gpu_files(options.root) and "CUDA_VISIBLE_DEVICES" not in env:
        lines.append("warning: this machine has GPU device files, but torch lists no GPU")
    role = f"{command.name or Path(command.program[0]).name}, {device}"
    return Job(place, adopted, made, role, "\n".join(lines), command.kind == "sharded")


def _summary(place: Started, adopted: bool, device: str, env: Mapping[str, str]) -> str:
    ranks, nodes = place.world_size, place.num_nodes
    return (
        f"{ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]} "
        f"({'adopted from' if adopted else 'started by'} {place.by}), {device}, "
        f"MASTER_ADDR={env['MASTER_ADDR']} MASTER_PORT={env['MASTER_PORT']}"
    )
