"""DTensors: tensors that torch's FSDP2 (``fully_shard``) spreads over the ranks."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ...backends._torch_private import scaler_of_parts
from ..world import data_device
from .groups import ExpertParallelGroups
from .slices import slice_dim


def is_sharded(tensor: Any) -> bool:
    """Return whether a value is a DTensor."""
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "full_tensor")


def shard_modules(
    modules: Iterable[torch.nn.Module], ignored: set[torch.nn.Parameter], mesh=None, **options
) -> None:
    """Call ``fully_shard`` on each module in this order. Collective.

    The default mesh has all ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if mesh is None:
        mesh = init_device_mesh(data_device().type, (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh, ignored_params=ignored, **options)


def full_tensor(value: Any) -> Any:
    """Gather a DTensor (collective); return any other value unchanged."""
    return value.full_tensor() if is_sharded(value) else value


def shard_like(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's part of a whole tensor if ``like`` is a DTensor of its shape."""
    if not is_sharded(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def slice_as_dtensor(part: torch.Tensor, name: str, groups: ExpertParallelGroups) -> torch.Tensor:
    """Return this rank's slice ``part`` of an expert's tensor as a DTensor with the same memory.

    Its mesh has the ranks that hold the other slices. ``name`` decides the dimension of the cut
    (:func:`~.slices.slice_dim`).
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    assert groups.replica_group is not None
    mesh = DeviceMesh.from_group(groups.replica_group, part.device.type)
    return DTensor.from_local(part, mesh, [Shard(slice_dim(name))], run_check=False)


def local_part(value: Any) -> Any:
    """Return this rank's part of a DTensor; return any other value unchanged."""
    return value.to_local() if is_sharded(value) else value


def sharded_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of DTensors over all ranks, fp32 scalar. Collective."""
    return full_tensor(torch.nn.utils.get_total_norm(list(grads))).float()


def sharded_grad_scaler(device: str, **options) -> torch.amp.GradScaler:
    """Return torch's GradScaler that sums its overflow flags over all ranks, also without FSDP.

    It unscales the local parts of DTensors, because no operator mixes DTensors and plain tensors.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    kind = scaler_of_parts(ShardedGradScaler, _with_local_grad)
    return kind(device, process_group=dist.group.WORLD, **options)


def _with_local_grad(param):
    return SimpleNamespace(grad=local_part(param.grad)) if is_sharded(param) else param
