"""Collectives by Tutel's names and arguments: ``simple_*`` without gradients, others with them."""

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed import is_expert, process_world
from ...distributed.world import all_gather_tensor, once_per_world, release_at_exit
from ...training import shard_optimizer

_TIMEOUT = datetime.timedelta(days=1)  # Tutel's: a rank may prepare data for hours
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def get_world_size(group=None) -> int:
    """Return the number of ranks; 1 without a process group."""
    return process_world()[1] if group is None else dist.get_world_size(group)


def get_world_rank(group=None) -> int:
    """Return the number of this rank; 0 without a process group."""
    return process_world()[0] if group is None else dist.get_rank(group)


def barrier(group=None) -> None:
    """Wait for all ranks."""
    if get_world_size(group) > 1:
        dist.barrier(group=group)


def simple_all_reduce(input: Tensor, group=None, op: Any = None, inplace=False) -> Tensor:
    """Return the sum over the ranks, or the result of another ``op``."""
    if get_world_size(group) == 1:
        return input
    output = input if inplace else input.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, op=dist.ReduceOp.SUM if op is None else op, group=group)
    return output


def _received(collective: Callable, input: Tensor, length: int, group) -> Tensor:
    if get_world_size(group) == 1:
        return input
    output = input.new_empty((length, *input.shape[1:]))
    collective(output, input.detach().contiguous(), group=group)
    return output


def simple_all_to_all(input: Tensor, group=None) -> Tensor:
    """Send part i of the first dimension to rank i."""
    return _received(dist.all_to_all_single, input, len(input), group)


def simple_split(input: Tensor, group=None) -> Tensor:
    """Return this rank's part of the first dimension."""
    return input.unflatten(0, (get_world_size(group), -1))[get_world_rank(group)]


def simple_reduce_scatter(input: Tensor, group=None) -> Tensor:
    """Return this rank's part of the sum over the ranks."""
    return _received(_reduce_scatter, input, len(simple_split(input, group)), group)


def simple_all_gather(input: Tensor, group=None) -> Tensor:
    """Join the tensors of all ranks along the first dimension."""
    return _received(all_gather_tensor, input, get_world_size(group) * len(input), group)


class _Linear(torch.autograd.Function):
    """A linear map between ranks, and the map that its gradient takes."""

    @staticmethod
    def forward(ctx, input, group, there, back):
        ctx.maps = group, back, there
        return there(input, group)

    @staticmethod
    def backward(ctx, *grads):
        return _Linear.apply(*grads, *ctx.maps), None, None, None


def all_to_all(
    input: Tensor, input_dim: int, output_dim: int, group=None, background=False, use_2dh=False
) -> Any:
    """Split ``output_dim`` over the ranks, and join what arrives along ``input_dim``."""
    found, size = input, get_world_size(group)
    if input_dim != output_dim and size > 1:
        parts = input.unflatten(output_dim, (size, -1)).movedim(output_dim, 0)
        found = _Linear.apply(parts, group, simple_all_to_all, simple_all_to_all)
        found = found.movedim(0, input_dim).flatten(input_dim, input_dim + 1)
    return (lambda: found) if background else found


def all_gather(input: Tensor, dim: int, fused=False, group=None) -> Tensor:
    """Join the tensors of all ranks along ``dim``; ``fused``: their gradients are summed."""
    back = simple_reduce_scatter if fused else simple_split
    return _Linear.apply(input.swapaxes(0, dim), group, simple_all_gather, back).swapaxes(0, dim)


def zero_gather(input: Tensor, full_shape: Sequence[int] | None = None, group=None) -> Tensor:
    """Join the slices of a parameter; each rank gets the summed gradient of its slice."""
    shape = full_shape or [len(input) * get_world_size(group), *input.shape[1:]]
    found = all_gather(input, 0, fused=True, group=group).reshape(-1)
    return found[: torch.Size(shape).numel()].view(*shape)


class Groups:
    """Groups of ranks: neighbours (``model_group``), and one of each of those (``data_group``)."""

    def __init__(self, group_count: int, backend: str):
        self.global_rank, self.global_size = process_world()
        self.group_count = self.global_size // -group_count if group_count < 0 else group_count
        if self.group_count < 1 or self.global_size % self.group_count:
            raise ValueError(f"group_count={group_count} does not divide {self.global_size} ranks")
        self.model_size = self.global_size // self.group_count
        self.data_rank, self.model_rank = divmod(self.global_rank, self.model_size)
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.global_group = dist.group.WORLD if self.is_distributed else None
        ranks = torch.arange(self.global_size).view(self.group_count, self.model_size)
        self.model_group, self.data_group = self._part_of(ranks), self._part_of(ranks.t())
        self.is_cuda, self.local_device = "nccl" in backend, torch.device("cpu")
        if self.is_cuda:
            local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            self.local_device = torch.device("cuda", local)
            torch.cuda.set_device(local)
        self.dist_print: Callable = (lambda *_, **__: None) if self.global_rank else print
        release_at_exit(self, "global_group", "model_group", "data_group")

    def _part_of(self, partition: Tensor):
        """Return this rank's group of a partition; all ranks create all groups in one order."""
        if not self.is_distributed or len(partition) == 1:
            return self.global_group
        made = {tuple(part): dist.new_group(part, timeout=_TIMEOUT) for part in partition.tolist()}
        return next(group for ranks, group in made.items() if self.global_rank in ranks)


def create_groups_from_world(
    group_count: int, include_init: str | None = None, parent_group=None
) -> Groups:
    """Divide all ranks into groups, as the page explains. Collective on the first call."""
    if include_init and not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group(include_init, timeout=_TIMEOUT)
    backend = include_init or (dist.get_backend() if dist.is_initialized() else "")
    return once_per_world(("tutel groups", group_count), lambda: Groups(group_count, backend))


def neighbours(size: int):
    """Return the group of ``size`` neighbouring ranks around this rank. Collective at first."""
    return create_groups_from_world(-size).model_group


class TutelDistributedOptimizer:
    """ZeRO-1: each rank steps a part of the shared parameters, and all of its experts."""

    def __init__(self, params: Iterable[Tensor], group=None, average_shared=False):
        self.params, self.group, self.average_shared = [*params], group, average_shared

    def warp_local(self, local_optim: Callable, *args, **kwargs):
        """Make this rank's optimizer, ``local_optim(params, *args, **kwargs)``; return self."""
        self.local_optim = local_optim(self.params, *args, **kwargs)
        if get_world_size(self.group) == get_world_size():
            shard_optimizer(self.local_optim)
        return self

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.local_optim.zero_grad()

    def step(self) -> None:
        """Reduce the gradients, step, and share the results. Collective."""
        divisor = get_world_size(self.group) if self.average_shared else 1
        for param in self.params:
            if param.grad is not None and not is_expert(param):
                param.grad = simple_all_reduce(param.grad, self.group) / divisor
        self.local_optim.step()
