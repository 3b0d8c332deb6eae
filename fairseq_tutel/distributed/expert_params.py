"""One gradient rule for expert parameters, whatever wraps the model.

Notation: g_r is the gradient of rank r's summed loss. fairseq averages dense gradients over the W
    ranks and
later multiplies by W / sample_size, so every gradient should leave this step as ``sum_r g_r / W``.

An expert's gradient already holds the sum over all ranks that sent it tokens (the all-to-all's
backward adds them), so it is divided, never averaged: by W with normalisation ``world_size``, by
sqrt(W) with ``sqrt_world_size`` (fairseq's README.moe.md; expert gradients are then sqrt(W) larger
than the true ones). With E < W experts each replica holds the sum over its block only: replicas are
averaged first and the divisor is E or sqrt(E), which for ``world_size`` is again the sum over all
ranks / W.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..config import EXPERT_GRAD_NORMALIZATIONS
from .groups import ExpertParallelGroups


def mark_expert(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """Mark a parameter as one of this rank's experts (the attribute that fairseq looks for)."""
    param.expert = True
    return param


def is_expert(param: torch.Tensor) -> bool:
    """Whether :func:`mark_expert` marked it."""
    return getattr(param, "expert", False)


def ddp_without_experts(model: torch.nn.Module, **options) -> DistributedDataParallel:
    """torch's DistributedDataParallel that leaves expert parameters alone, in the first broadcast
    too.

    Args:
        model: its expert parameters are marked.
        options: of DistributedDataParallel.
    """
    experts = [name for name, param in model.named_parameters() if is_expert(param)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    return DistributedDataParallel(model, **options)


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
                "its parameters): wrap the model with fairseq_tutel.moe.wrap_data_parallel"
            )


@torch.no_grad()
def average_expert_grad(grad: torch.Tensor, groups: ExpertParallelGroups) -> torch.Tensor:
    """What DistributedDataParallel does to dense gradients, for one gradient of an expert.

    Args:
        grad: sum over the tokens that this rank's experts received. Collective with replicas.

    Returns:
        The sum over all ranks divided by their number.
    """
    if groups.world_size == 1 or groups.simulated:
        return grad
    grad = grad / groups.world_size
    if groups.num_replicas > 1:
        dist.all_reduce(grad, group=groups.replica_group)
    return grad


@torch.no_grad()
def reduce_expert_grads(
    params: Iterable[torch.nn.Parameter], groups: ExpertParallelGroups, normalization: str
) -> None:
    """Average expert gradients over replicas and apply the normalisation, in place.

    Args:
        params: any parameters; only the marked ones are touched.
        normalization: ``world_size`` or ``sqrt_world_size``.
    """
    if normalization not in EXPERT_GRAD_NORMALIZATIONS:
        raise ValueError(
            f"expert gradient normalisation {normalization!r} is unknown; choose one of "
            f"{', '.join(EXPERT_GRAD_NORMALIZATIONS)}"
        )
    if groups.world_size == 1 or groups.simulated:
        return
    divisor = groups.ep_size if normalization == "world_size" else math.sqrt(groups.ep_size)
    scale = 1.0 / (divisor * groups.num_replicas)
    for param in params:
        if not (is_expert(param) and param.requires_grad):
            continue
        if param.grad is None:
            # replicas must take part in the same collectives
            param.grad = torch.zeros_like(param)
        param.grad.mul_(scale)
        if groups.num_replicas > 1:
            dist.all_reduce(param.grad, group=groups.replica_group)


@torch.no_grad()
def expert_grad_sq_norm(
    params: Iterable[torch.nn.Parameter], groups: ExpertParallelGroups
) -> torch.Tensor:
    """Squared L2 norm of the gradients of all E experts, fp32 scalar, the same on every rank.

    A rank's inf or nan reaches every rank through the sum, so that all of them see an overflow.
    Collective.
    """
    params = list(params)
    norms = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float32)
        for p in params
        if is_expert(p) and p.grad is not None
    ]
    device = params[0].device if params else torch.device("cpu")
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    if groups.world_size > 1 and not groups.simulated:
        dist.all_reduce(total)
        total /= groups.num_replicas
    return total
