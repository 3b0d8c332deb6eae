"""Which parameters are experts, and the collectives of their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .groups import ExpertParallelGroups


def mark_expert(param: torch.nn.Parameter, copies: int | None = None) -> torch.nn.Parameter:
    """Mark a parameter as one of this rank's experts (the attribute that fairseq looks for).

    Args:
        copies: see :func:`copies_of`.
    """
    param.expert = True
    if copies is not None:
        param.copies = copies
    return param


def copies_of(param: torch.Tensor, groups: ExpertParallelGroups) -> int:
    """Ranks that hold this very parameter of an expert: what gradients and norms go by.

    The ranks of an expert are ``groups.num_replicas`` (as it is for parameters that somebody marked
    without a number); of what is in slices there is one copy each.
    """
    return getattr(param, "copies", groups.num_replicas)


def is_expert(param: torch.Tensor) -> bool:
    """Whether :func:`mark_expert` marked it."""
    return getattr(param, "expert", False)


def refuse_plain_ddp(experts: torch.nn.Module) -> None:
    """Refuse a forward pass inside a DistributedDataParallel that treats experts as replicas.

    It has overwritten the ranks' different experts with rank 0's, and would average their
    gradients.

    Raises:
        ValueError: there is one around, and it does not leave these parameters alone.
    """
    # private, but the only trace that a wrapper leaves for the modules inside; else unchecked
    active = getattr(DistributedDataParallel, "_get_active_ddp_module", lambda: None)()
    mine = next(experts.parameters(), None)
    if active is None or mine is None:
        return
    for name, param in active.module.named_parameters():
        if param is mine and name not in active.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel would make the experts of all ranks one ({name} is among "
                "its parameters): use fairseq_tutel.hosts.wrap_data_parallel(model), or call "
                "prepare_data_parallel(model) on the module before it is wrapped"
            )


def sum_over_replicas_(tensor: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """Add up, in place, over the ranks that hold the same experts. Collective with replicas."""
    if groups.num_replicas > 1 and not groups.simulated:
        dist.all_reduce(tensor, group=groups.replica_group)
    return tensor


def max_over_replicas_(tensor: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """Elementwise maximum, in place, over the ranks that hold the same experts or slices of them.

    Collective with replicas.
    """
    if groups.num_replicas > 1 and not groups.simulated:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=groups.replica_group)
    return tensor


def sum_tensor_over_ranks_(tensor: torch.Tensor) -> torch.Tensor:
    """Add up, in place, over all ranks of the default group. Collective."""
    dist.all_reduce(tensor)
    return tensor


def gather_from_experts(
    tensor: torch.Tensor, groups: ExpertParallelGroups
) -> list[torch.Tensor] | None:
    """One tensor of each rank of the exchange group, on its first rank; None elsewhere. Collective.

    Args:
        tensor: of one shape and dtype on all ranks.
    """
    if not groups.communicates:
        return [tensor]
    first = groups.rank - groups.ep_rank
    parts = None
    if groups.ep_rank == 0:
        parts = [torch.empty_like(tensor) for _ in range(groups.ep_size)]
    dist.gather(tensor, parts, dst=first, group=groups.ep_group)
    return parts
