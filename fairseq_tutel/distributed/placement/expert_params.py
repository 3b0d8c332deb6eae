"""Marks of expert parameters, and collectives over the ranks that hold them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..world import data_device, process_world
from .groups import ExpertParallelGroups
from .owners import as_bytes


def mark_expert(param: torch.nn.Parameter, copies: int | None = None) -> torch.nn.Parameter:
    """Mark a parameter as an expert's by ``param.expert``, which fairseq reads.

    ``copies`` is the result of :func:`copies_of` (default: the number of replicas).
    """
    vars(param)["expert"] = True
    if copies is not None:
        vars(param)["copies"] = copies
    return param


def copies_of(param: torch.Tensor, groups: ExpertParallelGroups) -> int:
    """Return how many ranks hold this parameter of an expert; 1 for a slice."""
    return getattr(param, "copies", groups.num_replicas)


def is_expert(param: torch.Tensor) -> bool:
    """Return whether :func:`mark_expert` marked the parameter."""
    return getattr(param, "expert", False)


def sum_over_replicas_(tensor: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """Sum in place over the ranks that hold the same experts. Collective with replicas."""
    if groups.num_replicas > 1 and not groups.simulated:
        dist.all_reduce(tensor, group=groups.replica_group)
    return tensor


def max_over_replicas_(tensor: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """Take the elementwise maximum in place over the same ranks. Collective with replicas."""
    if groups.num_replicas > 1 and not groups.simulated:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=groups.replica_group)
    return tensor


def broadcast_over_replicas_(tensors: Iterable[torch.Tensor], groups: ExpertParallelGroups) -> None:
    """Overwrite tensors in place by those of the first rank with the same experts.

    Collective with replicas. The ranks pass matching tensors in the same order, of any dtype and
    device. Tensors on the meta device are skipped.
    """
    if groups.num_replicas == 1 or groups.simulated:
        return
    # the model may still be on the CPU, but NCCL sends tensors of GPUs only
    device = data_device(groups.replica_group)
    first = groups.rank % groups.ep_size
    for tensor in tensors:
        if tensor.is_meta:
            continue
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(as_bytes(sent), src=first, group=groups.replica_group)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)


def sum_tensor_over_ranks_(tensor: torch.Tensor) -> torch.Tensor:
    """Sum in place over all ranks of the default group. Collective; a no-op in one process."""
    if process_world()[1] > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_from_experts(
    tensor: torch.Tensor, groups: ExpertParallelGroups
) -> list[torch.Tensor] | None:
    """Gather the ranks' tensors of equal shape and dtype on the first rank of the exchange group.

    Collective. Other ranks get None.
    """
    if not groups.communicates:
        return [tensor]
    parts = None
    if groups.ep_rank == 0:
        parts = [torch.empty_like(tensor) for _ in range(groups.ep_size)]
    dist.gather(tensor, parts, dst=groups.rank - groups.ep_rank, group=groups.ep_group)
    return parts
