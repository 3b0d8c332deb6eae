"""Memory of a training step: its kinds, and a readable error when the device has none left."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from ..distributed import local_part, process_world
from ..moe.memory import gib, largest
from ..moe.model import unwrap

# remedies for programs that are not fairseq
_OPTIONS = (
    "compute activations again (torch.utils.checkpoint, use_reentrant=False)",
    "keep less in the experts (activation_memory='lean', or 'minimal')",
    "fewer experts than ranks, in slices (build_groups(E, placement='sliced'))",
    "shard dense state (shard_optimizer, shard_dense)",
)
# messages of GPUs and CPUs
_MESSAGE = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.,]+ [KMGT]?i?B(?:ytes)?|\d+ bytes)")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host has no memory left."""
    is_kind = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_kind or isinstance(error, RuntimeError) and bool(_MESSAGE.search(str(error)))


def memory_held(
    params: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Return the allocated bytes by kind: weights, gradients, copies, optimizer state.

    On a GPU also the peak of everything else. A DTensor counts with this rank's part.
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
    """Return the error in one line: the requested size, the largest consumers, the remedies."""
    rank, world_size = process_world()
    where = f" on rank {rank}" if world_size > 1 else ""
    asked = ""
    if tried := _TRIED.search(str(error)):
        number, unit = tried[1].split()
        asked = f" (it tried to allocate {gib(int(number)) if unit == 'bytes' else tried[1]})"
    return torch.OutOfMemoryError(
        f"out of memory{where}{asked}: the largest are {largest(kinds)}; what helps: "
        + "; ".join(options)
    )


@contextlib.contextmanager
def explain_out_of_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Name the largest consumers of memory and remedies if memory runs out; not collective.

    Put forward pass, backward pass and step into the block. Before a step,
    ``MoELayer.memory_of_step(tokens)`` estimates the memory of a layer.

    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=4)
    >>> with explain_out_of_memory(layer):
    ...     raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    Traceback (most recent call last):
    torch.OutOfMemoryError: out of memory (it tried to allocate 2.00 GiB): the largest are ...

    Args:
        model (nn.Module): the model, wrapped or not.
        optimizer (torch.optim.Optimizer): the optimizer (default None: its state is not counted).

    Raises:
        torch.OutOfMemoryError: memory ran out in the block on this rank; a RuntimeError.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, memory_held(unwrap(model).parameters(), optimizer)) from error


def _bytes(values: Iterable) -> int:
    return sum(local_part(value).nbytes for value in values if torch.is_tensor(value))
