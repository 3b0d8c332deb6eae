"""Switchable parallelism r: tokens travel to experts, weights travel to tokens, or both.

Source: Tutel (Hwang et al., arXiv 2206.03382, section 3.1). ``distributed/README.md`` says what
each r does, which one to choose, and what gathered weights cost. With experts in S slices (E < W;
rank s*E + j has slice s of expert j) one placement serves every r. With s = p*r + q a rank
exchanges tokens with the ranks [p*r*E, (p+1)*r*E) and computes part q of the hidden units. That is
the placement of r*E experts on W ranks (:mod:`.groups`), with a *part* in place of an expert;
exchanges do not know r. If experts are whole (S = 1), r = 0 gathers those of the exchange group.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..world import all_gather_tensor, once_per_world, release_at_exit
from .groups import ExpertParallelGroups, create_group


@dataclass(frozen=True)
class ExpertParallelism:
    """Expert parallelism with one r; see the module docstring.

    Attributes:
        groups: placement of the experts.
        exchange_groups: placement of the parts; tokens travel between its ranks. With r = 0 all
            experts are on one rank.
        gather_group: ranks whose weights are gathered; None for one rank or a simulation.
        gathered: (slices, experts) held by these ranks, slice-major; (1, e) gathers nothing.
    """

    r: int
    groups: ExpertParallelGroups
    exchange_groups: ExpertParallelGroups
    gather_group: Any | None
    gathered: tuple[int, int]

    def __post_init__(self):
        release_at_exit(self, "gather_group")

    @property
    def is_replicated(self) -> bool:
        """Whether tokens travel to whole experts and no weights travel."""
        return self.r == 1 and self.groups.placement == "replicated"

    def gathers(self, dim: int | None) -> bool:
        """Return whether a tensor that is cut along ``dim`` (None: not cut) is gathered."""
        return dim is not None or self.r == 0

    @property
    def gather_size(self) -> int:
        """Number of ranks whose weights are gathered."""
        return math.prod(self.gathered) // self.groups.num_local_experts

    @property
    def num_destinations(self) -> int:
        """Number of ranks that each token of an expert goes to."""
        return max(self.r, 1)

    @property
    def has_output_bias(self) -> bool:
        """Whether this rank adds fc2's bias; exactly one part of an expert does."""
        return self.part == 0

    @property
    def part(self) -> int:
        """q, this rank's part of an expert, of ``num_destinations`` parts."""
        return self.exchange_groups.ep_rank // self.groups.num_experts


def possible_r(groups: ExpertParallelGroups) -> list[int]:
    """Return 0 and the divisors of the number of slices; not collective.

    >>> from fairseq_tutel.distributed import build_groups
    >>> possible_r(build_groups(2, placement="sliced", simulate_world_size=8))
    [0, 1, 2, 4]
    """
    slices = groups.num_slices
    return [0, *(r for r in range(1, slices + 1) if slices % r == 0)]


def expert_parallelism(groups: ExpertParallelGroups, r: int) -> ExpertParallelism:
    """Return the parallelism r, of :func:`possible_r`. Collective on the first call for each r."""
    possible = possible_r(groups)
    if r not in possible:
        held = f"in {groups.num_slices} slices" if groups.num_slices > 1 else "whole"
        raise ValueError(
            f"r={r} (--moe-parallelism-r) does not fit {groups.num_experts} experts on "
            f"{groups.world_size} ranks with placement={groups.placement!r}, which are {held}: "
            f"choose one of {', '.join(map(str, possible))}"
        )
    return once_per_world(("expert parallelism", groups, r), lambda: _make(groups, r))


def _make(groups: ExpertParallelGroups, r: int) -> ExpertParallelism:
    slices, local = groups.num_slices, groups.num_local_experts
    if r == 0:
        alone = ExpertParallelGroups(
            groups.num_experts,
            rank=groups.rank,
            world_size=groups.world_size,
            num_replicas=groups.world_size,
            simulated=groups.simulated,
        )
        gathered = (slices, groups.num_experts)
        sliced = slices > 1 and not groups.simulated
        group = dist.group.WORLD if sliced else groups.ep_group
        return ExpertParallelism(r, groups, alone, group, gathered)
    if slices == 1:
        return ExpertParallelism(r, groups, groups, None, (1, local))
    parts = dataclasses.replace(
        groups,
        num_experts=r * groups.num_experts,
        ep_size=r * groups.num_experts,
        num_replicas=slices // r,
        ep_group=None,
        replica_group=None,
        control_group=None,
        placement="replicated",
    )
    if not groups.simulated:
        holders = [range(i, groups.world_size, parts.ep_size) for i in range(parts.ep_size)]
        parts = dataclasses.replace(
            parts, ep_group=create_group(parts.blocks), replica_group=create_group(holders)
        )
    return ExpertParallelism(r, groups, parts, parts.replica_group, (slices // r, 1))


def gather_weights(
    params: Sequence[torch.Tensor], dims: Sequence[int | None], parallelism: ExpertParallelism
) -> tuple[torch.Tensor, ...]:
    """Gather the weights that this rank computes with. Differentiable; collective.

    The gradient of a rank's weights is the sum over the ranks that gathered them, in fp32 (fp64 for
    fp64). A tensor that is not cut (fc2's bias) is added to the outputs by one rank only, so its
    gradient is zero on other ranks. ``params`` are [n, ...] with n/e kinds of weights of e experts;
    ``dims`` the dimension of each expert's tensor that is cut into slices, or None.
    """
    gathered = _Gather.apply(parallelism, dims, *params)
    if parallelism.gather_size == 1:
        return gathered
    return tuple(
        _joined(param, dim, parallelism.gathered[0]) if parallelism.gathers(dim) else param
        for param, dim in zip(gathered, dims, strict=True)
    )


def _joined(param: torch.Tensor, dim: int | None, slices: int) -> torch.Tensor:
    """Join gathered tensors, [ranks, n, ...] -> [experts, ..., F', ...]; ranks are slice-major."""
    param = param.view(slices, -1, *param.shape[2:])
    return param[0] if dim is None else param.movedim(0, 1 + dim).flatten(1 + dim, 2 + dim)


class _Gather(torch.autograd.Function):
    """Gather of all weights in one autograd node, so that collectives have one order on all ranks.

    Output biases pass through it even on ranks that do not add them, so that their gradients
    arrive in one order on all ranks: hosts may reduce a gradient as soon as it arrives.
    """

    @staticmethod
    def forward(ctx, parallelism, dims, *params):
        ctx.parallelism, ctx.dims = parallelism, dims
        found = []
        for param, dim in zip(params, dims, strict=True):
            if parallelism.gathers(dim):
                found.append(_all_gather(param, parallelism))
            else:
                added = parallelism.has_output_bias
                found.append(param.clone() if added else torch.zeros_like(param))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        parallelism, found = ctx.parallelism, []
        for grad, dim, needed in zip(grads, ctx.dims, ctx.needs_input_grad[2:], strict=True):
            if not needed:
                grad = None
            elif parallelism.gathers(dim):
                grad = _reduce_scatter(grad, parallelism)
            elif not parallelism.has_output_bias:
                grad = torch.zeros_like(grad)
            found.append(grad)
        return None, None, *found


def _all_gather(param: torch.Tensor, parallelism: ExpertParallelism) -> torch.Tensor:
    """Gather a parameter of n ranks as [n, ...]; return it unchanged if n is 1."""
    ranks = parallelism.gather_size
    if ranks == 1:
        return param.view_as(param)
    if parallelism.groups.simulated:
        return param.detach().expand(ranks, *param.shape).clone()
    gathered = param.new_empty((ranks, *param.shape))
    all_gather_tensor(
        gathered.flatten(), param.detach().contiguous().flatten(), parallelism.gather_group
    )
    return gathered


def _reduce_scatter(grad: torch.Tensor, parallelism: ExpertParallelism) -> torch.Tensor:
    """Return this rank's part [...] of the sum over n ranks of [n, ...].

    It is an all-to-all and a sum in fp32, because a reduce-scatter would round half precision at
    each addition.
    """
    ranks = parallelism.gather_size
    if ranks == 1:
        return grad
    parts = grad.contiguous()
    if not parallelism.groups.simulated:
        received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        dist.all_to_all_single(
            received.flatten(1), parts.flatten(1), group=parallelism.gather_group
        )
        parts = received
    return parts.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype)
