"""Tensors that torch's own FSDP2 (``fully_shard``) has spread over the ranks, as DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ..world import data_device
from .groups import ExpertParallelGroups
from .slices import slice_dim


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "full_tensor")


def shard_modules(
    modules: Iterable[torch.nn.Module], ignored: set[torch.nn.Parameter], mesh=None, **options
) -> None:
    """``fully_shard`` of each of the modules, in this order, over a mesh of all ranks by default.
    Collective.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if mesh is None:
        mesh = init_device_mesh(data_device().type, (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh, ignored_params=ignored, **options)


def full_tensor(value):
    """A DTensor gathered (collective); anything else as it is."""
    return value.full_tensor() if torch.is_tensor(value) and is_sharded(value) else value


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that every rank has, if ``like`` is a DTensor of its shape."""
    if not is_sharded(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def slice_as_dtensor(part: torch.Tensor, name: str, groups: ExpertParallelGroups) -> torch.Tensor:
    """This rank's slice of an expert's tensor as a DTensor over the ranks that hold the others.

    ``part``: is cut as :func:`~.slices.slice_dim` says of ``name``. The memory is the same.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(groups.replica_group, part.device.type)
    return DTensor.from_local(part, mesh, [Shard(slice_dim(name))], run_check=False)


def local_part(value):
    """This rank's part of a DTensor; anything else as it is."""
    return value.to_local() if torch.is_tensor(value) and is_sharded(value) else value


def sharded_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm of DTensors over all ranks, fp32 scalar. Collective."""
    return torch.nn.utils.get_total_norm(list(grads)).full_tensor().float()


def sharded_grad_scaler(device: str, **options) -> torch.amp.GradScaler:
    """torch's GradScaler that sums its overflow flags over all ranks; not for FSDP only.

    It takes gradients of DTensors beside plain ones, which no operator mixes. A fused optimizer
    skips a step by the flag itself: it gets one of torch's own shape, 0 or 1, of all ranks.
    """
    from torch.amp.grad_scaler import OptState
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class Scaler(ShardedGradScaler):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.clamp_(max=1.0)  # a sum over ranks

        def step(self, optimizer, *args, **kwargs):
            state = self._per_optimizer_states[id(optimizer)]
            if self._enabled and state["stage"] is OptState.READY:
                self.unscale_(optimizer)  # torch would have a fused one look at this rank alone
            return super().step(optimizer, *args, **kwargs)

        def _unscale_grads_(self, optimizer, inv_scale, found_inf, *rest):
            groups = [
                {"params": [_with_local_grad(param) for param in group["params"]]}
                for group in optimizer.param_groups
            ]
            local = SimpleNamespace(param_groups=groups)
            return super()._unscale_grads_(local, inv_scale, found_inf.squeeze(), *rest)

    return Scaler(device, process_group=dist.group.WORLD, **options)


def _with_local_grad(param):
    return SimpleNamespace(grad=local_part(param.grad)) if is_sharded(param) else param
