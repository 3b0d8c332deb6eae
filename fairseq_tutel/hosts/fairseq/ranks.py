"""One job of the processes that torchrun started, where fairseq would leave each alone.

fairseq's ``infer_init_method`` returns before it reads WORLD_SIZE where its own
``--distributed-world-size`` is 1: the default of its evaluation programs, and of training without a
GPU or with one visible GPU per process. Two such processes would train two models, write the same
checkpoint and report success, or score everything twice.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from fairseq import utils

from ...distributed import process_world
from ...models import check_stock_ranges
from .evaluation import is_moe_checkpoint

_TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# who starts processes -> its variables for a rank and for their number. SLURM's count of a step's
# tasks, not of the job's, which a batch script sees, too.
_STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


@dataclass(frozen=True)
class Started:
    """The place that whoever started this process gave it among several; (0, 1) if alone."""

    by: str
    rank: int
    world_size: int


def started(env: Mapping[str, str] = os.environ) -> Started:
    """What the environment states, torchrun's variables before those of what it may run in."""
    for starter, (rank, world_size) in _STARTERS.items():
        rank, world_size = env.get(rank, ""), env.get(world_size, "")
        if rank.isdigit() and world_size.isdigit() and int(world_size) > 1:
            return Started(starter, int(rank), int(world_size))
    return Started("", 0, 1)


def join_started_ranks(cfg, env: Mapping[str, str] = os.environ) -> None:
    """Fill in what fairseq's ``infer_init_method`` would have to, from torchrun's variables.

    Nothing is changed where an init method is given, as by ``python -m fairseq_tutel.launch``, or
    where torchrun started one process or none.

    Raises:
        ValueError: ``--distributed-world-size`` is another number, or the processes were started
            by something whose variables fairseq would not look at.
    """
    distributed, place = cfg.distributed_training, started(env)
    if distributed.distributed_init_method is not None or place.world_size == 1:
        return
    if not all(env.get(name) for name in _TORCH):
        if distributed.distributed_world_size == 1:
            refuse_separate_ranks(env)
        return  # fairseq reads SLURM's variables
    # an option of 1 and of all visible GPUs cannot be distinguished from the default
    devices = torch.cuda.device_count()
    given = distributed.distributed_world_size
    if given not in (1, devices, place.world_size):
        raise ValueError(
            f"--distributed-world-size {given}, but {place.by} started {place.world_size} processes"
        )
    distributed.distributed_init_method = "env://"
    distributed.distributed_world_size = place.world_size
    distributed.distributed_rank = place.rank
    distributed.distributed_no_spawn = True
    if cfg.common.cpu or not devices:
        distributed.device_id = 0
        if distributed.distributed_backend == "nccl":  # the default, for GPUs only
            distributed.distributed_backend = "gloo"
    else:
        distributed.device_id = int(env.get("LOCAL_RANK", place.rank)) % devices


def refuse_separate_ranks(env: Mapping[str, str] = os.environ) -> None:
    """Stop a process that would run a model with experts alone, though it was started as one of
    several; what no option on its command line can repair, as with Hydra, whose programs import
    the user dir too late.

    Raises:
        ValueError: see above; the message holds the command that works.
    """
    place, (_, connected) = started(env), process_world()
    if place.world_size == 1 or connected > 1:
        return
    program = os.path.basename(sys.argv[0])
    command = f"-m fairseq_tutel.launch -- {shlex.join([program, *sys.argv[1:]])}"
    if place.by == "torchrun":
        local = env.get("LOCAL_WORLD_SIZE", str(place.world_size))
        nodes = "" if int(local) == place.world_size else "[options for the nodes] "
        works = f"torchrun --nproc-per-node {local} {nodes}{command}"
    else:
        works = f"{place.by} [its options] python {command}"
    raise ValueError(
        f"{place.by} started {place.world_size} processes, which fairseq would run as "
        f"{place.world_size} jobs of one; as one job: {works}"
    )


def share_of_data(main):
    """Let each process of ``fairseq-generate``, which makes no process group, take its share.

    As ``python -m fairseq_tutel.launch`` does; stock decodes everything in each.

    Raises:
        ValueError: ``--results-path``, one file for all; an option out of its range.
    """

    @functools.wraps(main)
    def main_on_share(args):
        paths = utils.split_paths(getattr(args, "path", None) or "")  # several: an ensemble
        if not any(path and is_moe_checkpoint(path) for path in paths):
            return main(args)
        check_stock_ranges(args)
        place = started()
        if place.world_size > 1 and getattr(args, "distributed_world_size", 0) == 1:
            if args.results_path is not None:
                raise ValueError(
                    f"--results-path {args.results_path} is one file, but {place.by} started "
                    f"{place.world_size} processes: start one"
                )
            args.distributed_world_size, args.distributed_rank = place.world_size, place.rank
        return main(args)

    return main_on_share
