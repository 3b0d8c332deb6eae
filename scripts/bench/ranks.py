"""One benchmark on one or several ranks, started by ``python -m fairseq_tutel.launch``."""

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_TIMEOUT = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Ranks:
    """This process among those of the job; ``backend`` is gloo or nccl, empty for a single one."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    backend: str = ""

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def expect_several(self) -> None:
        """Raise ValueError in a single process, which has nobody to exchange with."""
        if self.world_size < 2:
            raise ValueError(
                "an exchange needs at least 2 ranks: put python -m fairseq_tutel.launch "
                "--nproc-per-node N -- before this command, or see two_nodes.py --help"
            )

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def wait_for_device(self) -> None:
        """Wait for what this rank's GPU has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait(self) -> None:
        """Wait for all ranks and their devices."""
        self.barrier()
        self.wait_for_device()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Element by element the largest value of any rank."""
        if self.world_size == 1:
            return list(values)
        on = self.device if self.backend == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=on)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()


def choose_device(name: str | None) -> torch.device:
    """``cpu``, ``cuda`` (the GPU of this local rank), or whichever is there.

    Raises:
        ValueError: a GPU was asked for and there is none.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: this process sees no GPU")
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device(name)


@contextlib.contextmanager
def connected(device: torch.device, backend: str | None = None) -> Iterator[Ranks]:
    """Form a process group where the environment says that there are several ranks.

    They meet at MASTER_ADDR:MASTER_PORT, or at INIT_METHOD where that is set (ranks that share a
    file and no network, see two_nodes.py).

    Args:
        backend: nccl for GPUs and gloo for CPUs if None.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(device)
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(
        backend,
        init_method=os.environ.get("INIT_METHOD", "env://"),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield Ranks(device, dist.get_rank(), world_size, backend)
    finally:
        dist.destroy_process_group()
