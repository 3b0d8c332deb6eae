"""Turns the options, the environment and the machine into the ranks to run on this node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import binding as bind
from .devices import Gpu, installed_gpus, visible_gpus, why_no_gpus
from .fairseq_commands import (
    TRAINING,
    Command,
    check_experts,
    rank_options,
    use_cpu,
    with_options,
)
from .hydra import check_config, quiet_start
from .nccl import ordered_launches, overlap_warning, profile_environment
from .placement import Placement, adopt, start_here
from .preflight import Report
from .rendezvous import check_port_free, master_address, master_port
from .shared_errors import shared_if
from .supervise import EarlyRequest, RankJob
from .topology import Topology


@dataclass(frozen=True)
class Options:
    """The launcher's own options, as cli.py documents them."""

    nproc_per_node: int | None = None  # None: auto
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    bind: str = "auto"
    nccl_profile: str = "none"
    prefix_output: bool = True
    root: str = "/"  # of /sys, /dev and /proc; another one in tests


@dataclass(frozen=True)
class Job:
    """What this process does: ``ranks`` to run, and a ``summary`` of them for the user."""

    placement: Placement
    command: Command
    ranks: list[RankJob]
    summary: str
    cpu: bool

    @property
    def report(self) -> Report | None:
        """What this node's launcher reports to the other nodes' before it starts ranks; None where
        there are no others, or where not every node has one launcher.

        All must come to the same answer. srun states the numbers of nodes and ranks (a node with
        one rank may be beside one with two); the node counts of mpirun are guesses, and torchrun's
        agents have compared theirs already.
        """
        placement = self.placement
        one_each = placement.source == "srun" and placement.world_size == placement.num_nodes
        if placement.num_nodes == 1 or (placement.adopted and not one_each):
            return None
        return Report(
            node=placement.node_rank,
            host=socket.gethostname(),
            num_nodes=placement.num_nodes,
            ranks_per_node=placement.local_world_size,
            device="cpu" if self.cpu else "cuda",
            program=self.command.name or Path(self.command.program[0]).name,
        )

    @property
    def early_request(self) -> EarlyRequest:
        """What a rank that is still importing does with SIGUSR1."""
        if self.command.imports_this_package:
            return "held"
        return "ignored" if self.command.name in TRAINING else "default"


def _ranks_per_node(options: Options, command: Command, num_nodes: int, num_gpus: int) -> int:
    """--nproc-per-node; for auto what the command's own world size implies, else one per GPU,
    else one."""
    if options.nproc_per_node is not None:
        return options.nproc_per_node
    world_size = command.integer("distributed_world_size")
    if world_size is not None and world_size > 0 and world_size % num_nodes == 0:
        return world_size // num_nodes
    return max(1, num_gpus)


def _require_equal(option: str, given: int | None, found: int, placement: Placement) -> None:
    if given is not None and given != found:
        raise ValueError(f"{option} {given} contradicts {placement.source}, which states {found}")


def place(options: Options, command: Command, env: Mapping[str, str], num_gpus: int) -> Placement:
    """The ranks that were started already, or those to start here.

    num_gpus: GPUs for the ranks on this node, 0 for the CPU. A task that is alone on its node
    (``srun --ntasks-per-node=1``) starts that node's ranks if there should be several.
    """
    given = adopt(env)
    if given is None:
        num_nodes = options.nnodes or 1
        if num_nodes > 1 and options.node_rank is None:
            raise ValueError(
                f"--nnodes {num_nodes} needs --node-rank on every node (or start with srun, "
                "mpirun or torchrun)"
            )
        if int(env.get("SLURM_NNODES") or 1) > 1 and options.nnodes is None:
            raise ValueError(
                f"the SLURM job has {env['SLURM_NNODES']} nodes, but this is no task of a step: "
                "start the launcher with srun (or give --nnodes)"
            )
        nproc = _ranks_per_node(options, command, num_nodes, num_gpus)
        return start_here(nproc, num_nodes, options.node_rank or 0)
    _require_equal("--nnodes", options.nnodes, given.num_nodes, given)
    _require_equal("--node-rank", options.node_rank, given.node_rank, given)
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
    """The GPU of every rank on this node; None for ranks on the CPU.

    Raises ValueError where there are more ranks than GPUs. srun --gpus-per-task and wrapper
    scripts under mpirun show each rank one GPU, its own; its number is then 0 for every rank.
    """
    ranks = placement.local_world_size
    if cpu:
        return [None] * ranks
    starter_hides_others = placement.adopted and placement.source in ("srun", "mpirun")
    if len(gpus) == 1 and ranks > 1 and starter_hides_others:
        return [gpus[0] if i == placement.local_rank else None for i in range(ranks)]
    if ranks > len(gpus):
        seen = env.get("CUDA_VISIBLE_DEVICES")
        why = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"
        raise ValueError(
            f"{ranks} ranks on this node but {len(gpus)} visible GPUs{why}: start fewer ranks, "
            "or use the CPU (fairseq: --cpu or common.cpu=true, others: CUDA_VISIBLE_DEVICES=)"
        )
    return list(gpus[:ranks])


def _keep_starters_binding(
    topology: Topology, placement: Placement, gpu: Gpu | None, allowed: set, wide: set
) -> bind.RankBinding | None:
    """srun and mpirun may have bound this rank already. Their choice stands unless it is off the
    GPU's NUMA node; None then, and where they have not bound it."""
    if not allowed < wide:
        return None
    node = topology.node_of_pci(gpu.pci_id) if gpu else None
    if node is not None and not allowed <= set(topology.numa_cpus[node]):
        return None
    # mpirun binds to sockets by default: several ranks then share one set of cores.
    sharers = -(-len(allowed) * placement.local_world_size // len(wide))
    threads = max(1, len(topology.cores(allowed)) // sharers)
    return bind.RankBinding(
        placement.local_rank,
        gpu,
        tuple(sorted(allowed)),
        None,
        threads,
        f"bound by {placement.source}",
    )


def choose_bindings(
    options: Options, placement: Placement, gpus: Sequence[Gpu | None]
) -> list[bind.RankBinding]:
    """Bindings of the ranks on this node; of this rank alone where the starter hides the others."""
    allowed = set(os.sched_getaffinity(0))
    topology = Topology.read(options.root, fallback_cpus=allowed)
    if options.bind == "none":
        return bind.no_bindings(topology, allowed, gpus)
    by_tasks = placement.source in ("srun", "mpirun")
    wide = bind.cpuset(allowed, topology) if by_tasks else allowed
    if options.bind != "auto":
        return bind.explicit_bindings(topology, wide, gpus, options.bind)
    own = gpus[placement.local_rank]
    if placement.adopted:
        kept = _keep_starters_binding(topology, placement, own, allowed, wide)
        if kept is not None:
            return [kept]
    if own is not None and None in gpus:  # the starter hides the other ranks' GPUs
        everything = installed_gpus(options.root)
        if own.pci_id is not None and own.pci_id in everything:
            all_ranks = bind.auto_bindings(topology, wide, [Gpu(0, pci) for pci in everything])
            mine = all_ranks[everything.index(own.pci_id)]
            return [replace(mine, local_rank=placement.local_rank, gpu=own)]
    return bind.auto_bindings(topology, wide, gpus)


def _shared_environment(
    options: Options, placement: Placement, env: Mapping[str, str], command: Command
) -> dict[str, str]:
    """What every rank of the job gets on top of the user's environment."""
    given = dict(env)
    if options.master_addr:
        given["MASTER_ADDR"] = options.master_addr
    port = options.master_port or command.integer("distributed_port")
    if options.master_port and command.integer("distributed_port") not in (
        None,
        -1,
        options.master_port,
    ):
        raise ValueError(
            f"{command.spelled('distributed_port')} {command.integer('distributed_port')} "
            f"contradicts --master-port {options.master_port}"
        )
    if port and port > 0:
        given["MASTER_PORT"] = str(port)
    address, port = master_address(placement, given), master_port(placement, given)
    if placement.world_size > 1:
        check_port_free(placement, port)
    shared = {
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **profile_environment(options.nccl_profile, env),
    }
    # nvidia-smi numbers the GPUs by PCI address; CUDA's own order could differ.
    shared.setdefault("CUDA_DEVICE_ORDER", env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))
    if placement.single_node and (Path(options.root) / "sys/class/net/lo").exists():
        # gloo otherwise looks up the host's own name, which need not resolve.
        shared["GLOO_SOCKET_IFNAME"] = env.get("GLOO_SOCKET_IFNAME", "lo")
    return shared


def _device_environment(
    command: Command, gpu: Gpu | None, gpus: Sequence[Gpu], env: Mapping[str, str]
) -> dict[str, str]:
    if gpu is None:
        # torch then asks for huge pages for big CPU tensors, which otherwise take several times as
        # long to fill for the first time (where transparent huge pages are set to madvise)
        huge_pages = {"THP_MEM_ALLOC_ENABLE": env.get("THP_MEM_ALLOC_ENABLE", "1")}
        # fairseq's distributed_init makes a CUDA tensor wherever there is a GPU, --cpu or not
        return {**huge_pages, "CUDA_VISIBLE_DEVICES": ""} if gpus else huge_pages
    if command.kind == "sharded":
        # fairseq-generate has no --device-id in effect: it takes the first GPU it sees.
        visible = env.get("CUDA_VISIBLE_DEVICES")
        name = visible.split(",")[gpu.index] if visible else str(gpu.index)
        return {"CUDA_VISIBLE_DEVICES": name}
    return {}


def _users_threads(env: Mapping[str, str]) -> str | None:
    """OMP_NUM_THREADS where somebody chose it: torchrun makes it 1 for several ranks by itself,
    whatever cores they have."""
    torchruns = "TORCHELASTIC_RUN_ID" in env and env.get("LOCAL_WORLD_SIZE") != "1"
    threads = env.get("OMP_NUM_THREADS")
    return None if torchruns and threads == "1" else threads


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _summary(placement: Placement, cpu: bool, shared: Mapping[str, str], warning: str) -> str:
    lines = [
        f"{_count(placement.world_size, 'rank')} on {_count(placement.num_nodes, 'node')} "
        f"({'adopted from' if placement.adopted else 'started by'} {placement.source}), "
        f"{'gloo on the CPU' if cpu else 'nccl on GPUs'}, "
        f"MASTER_ADDR={shared['MASTER_ADDR']} MASTER_PORT={shared['MASTER_PORT']}"
    ]
    return "\n".join(lines + ([f"warning: {warning}"] if warning else []))


def prepare_job(options: Options, command: Command, env: Mapping[str, str]) -> Job:
    """The ranks of this node. Checks everything before a rank or a process group exists.

    Raises:
        ValueError: naming the options, variables or hardware that cannot work together.
    """
    if command.kind == "hydra":
        check_config(command.arguments)
    gpus = visible_gpus(env, options.root)
    cpu = use_cpu(command, len(gpus))
    placement = place(options, command, env, 0 if cpu else len(gpus))
    with shared_if(placement.adopted):  # else the ranks on this node may be what is wrong
        check_experts(command, placement.world_size)
    assigned = assign_gpus(placement, gpus, cpu, env)
    shared = _shared_environment(options, placement, env, command)
    if placement.world_size > 1 and not cpu:
        shared |= ordered_launches(env)
    threads = _users_threads(env)
    bindings = [
        replace(bound, users_threads=threads)
        for bound in choose_bindings(options, placement, assigned)
    ]

    def rank_job(bound: bind.RankBinding) -> RankJob:
        local_rank, gpu = bound.local_rank, assigned[bound.local_rank]
        rank = placement.rank + local_rank - placement.local_rank
        added = rank_options(
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
            **(quiet_start(env) if command.kind == "hydra" else {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "OMP_NUM_THREADS": bound.omp_num_threads,
            # for the record: benchmarks keep the variables of this prefix with their results
            "FAIRSEQ_TUTEL_BIND": bound.describe(options.bind),
            "FAIRSEQ_TUTEL_NCCL_PROFILE": options.nccl_profile,
        }
        prefix = f"[rank {rank}] " if options.prefix_output and rank > 0 else None
        # once its process group is there, fairseq itself lets only rank 0 say more than warnings
        alike = command.kind in ("grouped", "hydra")
        return RankJob(rank, with_options(command, added), rank_env, bound, prefix, alike)

    mine = [b for b in bindings if not placement.adopted or b.local_rank == placement.local_rank]
    degree = command.stated("moe_overlap_degree")
    warning = overlap_warning(degree, env) if gpus else why_no_gpus(env, options.root)
    table = bind.format_table(bindings, socket.gethostname())
    summary = _summary(placement, cpu, shared, warning) + "\n" + table
    return Job(placement, command, [rank_job(b) for b in mine], summary, cpu)
