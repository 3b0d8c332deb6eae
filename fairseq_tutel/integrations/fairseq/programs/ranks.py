"""Makes one job of the processes that torchrun started.

fairseq's ``infer_init_method`` does not read WORLD_SIZE if its own ``--distributed-world-size`` is
1, the default without several visible GPUs. Two such processes would train two models and write the
same checkpoint, or score everything twice, and report success.
"""

import functools
import os
import shlex
import sys
import threading
from collections.abc import Mapping

import torch

from ....command_line.starters import started
from ....distributed import process_world
from . import program

# Seconds that a rank waits for the others to connect. torch's own limit is 30 minutes (gloo).
_TIMEOUT, _SECONDS = "FAIRSEQ_TUTEL_START_TIMEOUT", 300.0
_TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def join_started_ranks(cfg, env: Mapping[str, str] = os.environ) -> None:
    """Fill in fairseq's distributed config from torchrun's variables if it has no init method."""
    distributed, place = cfg.distributed_training, started(env)
    if distributed.distributed_init_method is not None:
        return
    if place.world_size == 1:
        if not all(env.get(name) for name in _TORCH):
            _refuse_missing_devices(distributed)
        return
    if not all(env.get(name) for name in _TORCH):
        if distributed.distributed_world_size == 1:
            refuse_separate_ranks(env)
        return  # fairseq reads SLURM's variables
    # 1 and the number of visible GPUs may be fairseq's defaults rather than the user's choice
    devices = torch.cuda.device_count()
    given = distributed.distributed_world_size
    if given not in (1, devices, place.world_size):
        processes = f"{place.by} started {place.world_size} processes"
        raise ValueError(f"--distributed-world-size {given}, but {processes}")
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
    """Raise ValueError, with the command that works, for ranks that fairseq would run separately.

    No option can repair the run; Hydra's programs, for example, import the user dir too late.
    """
    place, (_, connected) = started(env), process_world()
    if place.world_size == 1 or connected > 1:
        return
    python = "" if place.by == "torchrun" else "python "
    raise ValueError(
        f"fairseq would run the {place.world_size} processes of {place.by} as separate jobs; to "
        f"run one job: {place.by} [its options] {python}-m fairseq_tutel.launch -- {_command()}"
    )


def _command() -> str:
    return shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])


def _refuse_missing_devices(distributed) -> None:
    """Raise ValueError, with the command that works, where fairseq cannot start the ranks."""
    wanted, devices = distributed.distributed_world_size, torch.cuda.device_count()
    if wanted > max(devices, 1) and distributed.distributed_port <= 0:
        raise ValueError(
            f"--distributed-world-size {wanted}: fairseq starts a rank per GPU, of which there are "
            f"{devices}; to start the ranks: python -m fairseq_tutel.launch --nproc-per-node "
            f"{wanted} -- {_command()}"
        )


def refuse_several_readers(env: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError for ranks that would take lines of standard input from each other."""
    if (place := started(env)).world_size > 1:
        raise ValueError(
            f"{program()} reads standard input in one process, and {place.by} started "
            f"{place.world_size}: start one"
        )


def allow_ranks_on_cpu(cfg) -> None:
    """Let a dense model train on several ranks of a CPU, where fairseq names GPU 0 to torch."""
    distributed = cfg.distributed_training
    on_cpu = cfg.common.cpu or not torch.cuda.is_available()
    if process_world()[1] > 1 and on_cpu and distributed.ddp_backend in ("pytorch_ddp", "c10d"):
        distributed.ddp_backend = "legacy_ddp"


def meet_in_time(cfg, main):
    """Return ``main`` with a limit on the time that a rank waits for the others to connect."""
    distributed = cfg.distributed_training
    if distributed.distributed_init_method is None or not distributed.distributed_no_spawn:
        return main
    seconds = float(os.environ.get(_TIMEOUT) or _SECONDS)
    timer = threading.Timer(seconds, _end_without_others, (distributed.distributed_rank, seconds))
    timer.daemon = True
    timer.start()

    @functools.wraps(main)
    def main_of_connected_ranks(*args, **kwargs):
        timer.cancel()
        return main(*args, **kwargs)

    return main_of_connected_ranks


def _end_without_others(rank: int, seconds: float) -> None:
    """End the process from the timer's thread, because the main thread waits inside torch."""
    sys.stderr.write(
        f"{program()}: error (rank {rank}): the other ranks have not connected within "
        f"{seconds:g} seconds: has one of them failed? ({_TIMEOUT}=SECONDS waits longer)\n"
    )
    sys.stderr.flush()
    os._exit(1)
