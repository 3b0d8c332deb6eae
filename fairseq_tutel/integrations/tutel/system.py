"""Names of ``tutel.system``: a session, times and names of files."""

import time
from pathlib import Path

import torch

from . import net

_session: list[net.Groups] = []


def init_data_model_parallel(group_count: int = 1, backend: str = "nccl") -> net.Groups:
    """Start ``torch.distributed`` if the environment names ranks; return the session."""
    _session[:] = [net.create_groups_from_world(group_count, include_init=backend)]
    return _session[0]


def get_local_session() -> net.Groups:
    """Return the session of :func:`init_data_model_parallel`."""
    if not _session:
        raise RuntimeError("there is no session: call system.init_data_model_parallel() first")
    return _session[0]


def record_time(is_cuda: bool | None = None) -> float:
    """Return the time in seconds, after the GPU has done its work; None: as the session has."""
    if get_local_session().is_cuda if is_cuda is None else is_cuda:
        torch.cuda.synchronize()
    return time.time()


def apply_rank_size_from_pattern(filename: str, rank: int, size: int, create_dir=True) -> str:
    """Return a name with ``{rank}`` and ``{size}`` replaced; make its folder."""
    path = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    if create_dir:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path
