"""Make the ranks to run on this node of the options, the environment and the machine."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Job(NamedTuple):
    """Ranks that this process starts, or the one that it becomes; entry.py says what makes one."""

    place: Started  # of the first rank
    ranks: list[dict[str, Any]]
    role: str  # what all nodes must have in common
    summary: str
    prints_results: bool  # to standard output, where programs look for lines that begin with H-


def find_place(options: Namespace, command: Command, env: Mapping[str, str], gpus: int) -> Started:
    """Return the rank that was started already, or the first to be started here."""
    given, nodes, node = full_place(env), options.nnodes or 1, options.node_rank or 0
    source = given.by if given else "launcher"
    if given:
        nodes, node = given.num_nodes, given.node_rank
    elif nodes > 1 and options.node_rank is None:
        raise ValueError(f"--nnodes {nodes} needs --node-rank on every node (or srun, or mpirun)")
    elif int(env.get("SLURM_NNODES") or 1) > 1 and options.nnodes is None:
        why = f"the SLURM job has {env['SLURM_NNODES']} nodes, but this is no task of a step"
        raise ValueError(f"{why}: start the launcher with srun (or give --nnodes)")
    # auto: by the command's world size, or one per GPU, or one
    size = command.number("distributed_world_size") or 0
    nproc = options.nproc_per_node or (size // nodes if size > 0 == size % nodes else max(1, gpus))
    # a task that is alone on its node (``srun --ntasks-per-node=1``) starts that node's ranks
    alone = given and given.local_world_size == 1 and given.world_size == nodes
    if given and not (alone and nproc > 1 and source != "torchrun"):
        place = given
    else:
        place = Started(source, node * nproc, nodes * nproc, 0, nproc, node, nodes, adopted=False)
    stated = {"nnodes": place.num_nodes, "node_rank": place.node_rank}
    for key, stands in (stated | {"nproc_per_node": place.local_world_size}).items():
        if (wanted := getattr(options, key)) not in (None, stands):
            what = f"--{key.replace('_', '-')} {wanted}"
            raise ValueError(f"{what} contradicts {source}, which states {stands}")
    return place


def _assign_gpus(place: Started, gpus: Sequence[Gpu], seen: str | None) -> list[Gpu | None]:
    """Return the GPU of every rank on this node, None for those that this process cannot see."""
    ranks = place.local_world_size
    if len(gpus) == 1 and ranks > 1 and place.adopted and place.by != "torchrun":
        # srun --gpus-per-task and scripts under mpirun show each rank its own GPU, as number 0
        return [gpus[0] if i == place.local_rank else None for i in range(ranks)]
    if ranks > len(gpus):
        why = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"
        cpu = "fairseq: --cpu or common.cpu=true, others: CUDA_VISIBLE_DEVICES="
        found = f"{ranks} ranks on this node but {len(gpus)} visible GPUs{why}"
        raise ValueError(f"{found}: start fewer ranks, or use the CPU ({cpu})")
    return list(gpus[:ranks])


def _environment(
    options: Namespace, command: Command, place: Started, env: Mapping[str, str], cpu: bool
) -> dict[str, str]:
    """Return variables that all ranks of this node get."""
    # nvidia-smi numbers the GPUs by PCI address; CUDA's own order could differ.
    defaults = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **NCCL_PROFILES[options.nccl_profile]}
    if place.num_nodes == 1 and (Path(options.root) / "sys/class/net/lo").exists():
        # gloo otherwise looks up the host's own name, which need not resolve.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    if cpu:
        # huge pages for big CPU tensors, which otherwise take several times as long to fill first
        defaults["THP_MEM_ALLOC_ENABLE"] = "1"
    elif place.world_size > 1:
        # A rank with experts has several communicators. NCCL (2.26 or newer) then orders their
        # operations as the host launched them, so that ranks do not wait for each other forever.
        defaults["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    path = os.pathsep.join(filter(None, (STARTUP, env.get("PYTHONPATH"))))
    port = options.master_port or max(0, command.number("distributed_port") or 0)
    given = {"MASTER_ADDR": options.master_addr, "MASTER_PORT": str(port or "")}
    given = {**env, **{name: value for name, value in given.items() if value}}
    return {
        **{name: env.get(name, default) for name, default in defaults.items()},
        **({} if command.kind == "script" else {"PYTHONPATH": path}),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": master_address(place, given),
        "MASTER_PORT": str(master_port(place, given)),
        # for the record: benchmarks keep the variables of this prefix with their results
        "FAIRSEQ_TUTEL_NCCL_PROFILE": options.nccl_profile,
    }


def prepare_job(options: Namespace, command: Command, env: Mapping[str, str]) -> Job:
    """Return the ranks of this node, checked before a rank or a process group exists."""
    commands.check_user_dir(command)
    gpus, seen = visible_gpus(env, options.root), env.get("CUDA_VISIBLE_DEVICES")
    cpu = commands.use_cpu(command, len(gpus))
    place = find_place(options, command, env, 0 if cpu else len(gpus))
    size, nodes, mine = place.world_size, place.num_nodes, place.local_rank
    assigned = [None] * place.local_world_size if cpu else _assign_gpus(place, gpus, seen)
    shared = _environment(options, command, place, env, cpu)
    device = "gloo on the CPU" if cpu else "nccl on GPUs"
    ranks, lines = [], [
        f"{size} rank{'s'[: size != 1]} on {nodes} node{'s'[: nodes != 1]} "
        f"({'adopted from' if place.adopted else 'started by'} {place.by}), {device}, "
        f"MASTER_ADDR={shared['MASTER_ADDR']} MASTER_PORT={shared['MASTER_PORT']}"
    ]  # fmt: skip
    alike = {"world_size": size, "shared_node": place.local_world_size > 1, "cpu": cpu}
    for bound in choose_bindings(options.bind, assigned, options.root, place):
        gpu, threads = bound.gpu, env.get("OMP_NUM_THREADS") or bound.threads
        what = "" if gpu is None else f"GPU {gpu.index} ({gpu.pci_id or '?'}), "
        lines.append(f"  local rank {bound.local_rank}: {what}{bound}, {threads} threads")
        if place.adopted and bound.local_rank != mine:
            continue
        rank = place.rank + bound.local_rank - mine
        own = {"RANK": str(rank), "LOCAL_RANK": str(bound.local_rank)}
        own |= {"OMP_NUM_THREADS": str(threads), "FAIRSEQ_TUTEL_BIND": str(bound)}
        if cpu and gpus:
            # fairseq's distributed_init makes a CUDA tensor wherever there is a GPU, --cpu or not
            own["CUDA_VISIBLE_DEVICES"] = ""
        elif gpu and command.kind == "sharded":
            # fairseq-generate has no --device-id in effect: it takes the first GPU it sees.
            own["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu.index] if seen else str(gpu.index)
        number = gpu.index if gpu else bound.local_rank
        added = commands.rank_options(command, rank=rank, device=number, **alike)
        words, holds = commands.with_options(command, added), command.name in commands.TRAINING
        ranks.append({"argv": words, "env": {**shared, **own}, "cpus": bound.cpus, "holds": holds})
    if not gpus and has_gpu_files(options.root) and seen is None:
        lines.append("warning: this machine has GPU device files, but torch lists no GPU")
    role = f"{command.name or Path(command.program[0]).name}, {device}"
    return Job(place, ranks, role, "\n".join(lines), command.kind == "sharded")
