"""What a training step holds of a device's memory, and a line that says it where memory ran out.

    with explain_out_of_memory(model, optimizer):
        ...                                         # forward, backward and step

An error of torch's that memory ran out becomes one that names the largest consumers, measured on
the model and the optimizer as they are, and what helps: activations that are computed again,
experts in slices, dense state that is sharded. Before a step: ``MoELayer.memory_of_step``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from ..distributed import process_world
from ..moe.memory import gib, largest
from ..moe.model import unwrap

# what helps, for programs of one's own
_OPTIONS = (
    "compute activations again (torch.utils.checkpoint, use_reentrant=False)",
    "fewer experts than ranks, in slices (build_groups(E, placement='sliced'))",
    "shard dense state (shard_optimizer, shard_dense)",
)
# of GPUs; of a CPU
_MESSAGE = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.,]+ [KMGT]?i?B(?:ytes)?|\d+ bytes)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    is_kind = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_kind or isinstance(error, RuntimeError) and bool(_MESSAGE.search(str(error)))


def memory_held(
    params: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Bytes by kind of what is allocated now: weights, gradients, optimizer state; and, on a GPU,
    the most that anything else took, as of the last ``torch.cuda.reset_peak_memory_stats``.

    Of DTensors this rank's part.
    """
    params = list(params)
    stepped = [] if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
    known = {id(param) for param in params}
    copies = [param for param in stepped if id(param) not in known]
    entries = [] if optimizer is None else optimizer.state.values()
    kinds = {
        "weights": _bytes(params),
        "gradients": _bytes(param.grad for param in params),
        "fp32 copies": _bytes(copies) + _bytes(copy.grad for copy in copies),
        "optimizer state": sum(_bytes(state.values()) for state in entries),
    }
    device = params[0].device if params else torch.device("cpu")
    if device.type == "cuda":
        rest = torch.cuda.max_memory_allocated(device) - sum(kinds.values())
        kinds["activations and buffers"] = max(rest, 0)
    return {name: size for name, size in kinds.items() if size}


def out_of_memory(
    error: BaseException, kinds: Mapping[str, int], options: Iterable[str] = _OPTIONS
) -> torch.OutOfMemoryError:
    """The error in one line: what was asked for, the largest consumers, and what helps."""
    rank, world_size = process_world()
    where = f" on rank {rank}" if world_size > 1 else ""
    tried = _TRIED.search(str(error))
    asked = f" (it tried to allocate {_in_words(tried[1])})" if tried else ""
    return torch.OutOfMemoryError(
        f"out of memory{where}{asked}: the largest are {largest(kinds)}; what helps: "
        + "; ".join(options)
    )


@contextlib.contextmanager
def explain_out_of_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """See the module docstring. ``optimizer``: None if it has no state yet.

    Raises:
        torch.OutOfMemoryError: memory ran out within, on this rank; a RuntimeError, as torch's.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, memory_held(unwrap(model).parameters(), optimizer)) from error


def _bytes(values: Iterable) -> int:
    local = (v.to_local() if hasattr(v, "to_local") else v for v in values if torch.is_tensor(v))
    return sum(value.nbytes for value in local)


def _in_words(size: str) -> str:
    number, unit = size.split()
    return gib(int(number)) if unit == "bytes" else size
