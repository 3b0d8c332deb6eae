"""One gradient rule, one norm and one overflow check for dense parameters and experts.

g_r is the gradient of rank r's summed loss. Dense gradients are averaged over the W ranks, so every
gradient should leave this step as ``sum_r g_r / W`` (fairseq later multiplies by W / sample_size).

An expert's gradient already holds the sum over all ranks that sent it tokens (the all-to-all's
backward adds them), so it is divided, never averaged: by W with normalisation ``world_size``, by
sqrt(W) with ``sqrt_world_size`` (fairseq's README.moe.md). A replica holds the sum over its block
only: replicas are averaged first and the divisor is the size of a block, which for ``world_size``
is again the sum over all ranks / W. With E < W experts, blocks of E ranks are as large as can be
and ``sqrt_world_size`` divides by sqrt(E); smaller blocks, if they are chosen, change no gradient.

The gradient of a slice is the sum over all W ranks at once; what all holders of slices have (fc2's
bias) is summed like a replica's. What decides is the number of copies of a parameter
(:func:`~fairseq_tutel.distributed.copies_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from ..config import EXPERT_GRAD_NORMALIZATIONS
from ..distributed import (
    ExpertParallelGroups,
    copies_of,
    is_expert,
    is_sharded,
    process_world,
    sharded_grad_scaler,
    sharded_norm,
    sum_over_replicas_,
    sum_tensor_over_ranks_,
)
from ..moe.model import moe_layers, unwrap


@torch.no_grad()
def average_expert_grad(
    grad: torch.Tensor, groups: ExpertParallelGroups, copies: int | None = None
) -> torch.Tensor:
    """What DistributedDataParallel does to dense gradients, for one gradient of an expert, the sum
    over the tokens that this rank's experts received: the sum over all ranks divided by their
    number.

    ``copies``: of the parameter, by default as many as the ranks that hold its expert; with them
    the call is collective.
    """
    if groups.world_size == 1 or groups.simulated:
        return grad
    mean = grad / groups.world_size
    return mean if copies == 1 else sum_over_replicas_(mean, groups)


@torch.no_grad()
def reduce_expert_grads(
    params: Iterable[nn.Parameter], groups: ExpertParallelGroups, normalization: str = "world_size"
) -> None:
    """Average expert gradients over replicas and apply the normalisation, in place.

    For hosts that reduce gradients once per update, and have not called
    :func:`~fairseq_tutel.training.prepare_data_parallel`, which does it as they arrive.

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
    block = min(groups.num_experts, groups.world_size)
    divisor = block if normalization == "world_size" else math.sqrt(block)
    scale = 1.0 / (divisor * (groups.world_size / block))
    experts = [param for param in params if is_expert(param) and param.requires_grad]
    for param in experts:
        if param.grad is None:
            # replicas must take part in the same collectives
            param.grad = torch.zeros_like(param)
    if experts:
        torch._foreach_mul_([param.grad for param in experts], scale)  # one launch for all of them
    for param in experts:
        if copies_of(param, groups) > 1:
            sum_over_replicas_(param.grad, groups)


@torch.no_grad()
def expert_grad_sq_norm(
    params: Iterable[nn.Parameter], groups: ExpertParallelGroups
) -> torch.Tensor:
    """Squared L2 norm of the gradients of all E experts, fp32 scalar, the same on every rank.

    A rank's inf or nan reaches every rank through the sum, so that all of them see an overflow.
    Collective.
    """
    params = list(params)
    device = params[0].device if params else torch.device("cpu")
    total = _sq_norm_of_copies([p for p in params if is_expert(p)], groups, device).float()
    if groups.world_size > 1 and not groups.simulated:
        sum_tensor_over_ranks_(total)
        total /= groups.num_replicas
    return total


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a model with experts on several ranks. Collective.

    The norm is over the dense parameters and all experts of all ranks, replicas counted once: that
    of one process with all experts, the same on every rank.

    Args:
        model: wrapped or not; the gradients of all its parameters are clipped, in place. They are
            reduced already, as :func:`~.data_parallel.wrap_data_parallel` does, and unscaled.
        max_norm: largest L2 norm; ``float("inf")`` only measures it.

    Returns:
        The norm before clipping, fp32 scalar.
    """
    model = unwrap(model)
    layers = moe_layers(model).values()
    experts = {param for layer in layers for param in layer.experts.parameters()}
    dense = [p.grad for p in model.parameters() if p not in experts and p.grad is not None]
    plain = [grad for grad in dense if not is_sharded(grad)]
    sharded = [grad for grad in dense if is_sharded(grad)]
    device = next(model.parameters()).device
    sq_norm = torch.zeros((), dtype=torch.float64, device=device)
    for layer in layers:
        total = _sq_norm_of_copies(layer.experts.parameters(), layer.groups, device)
        sq_norm += total / layer.groups.num_replicas
    if process_world()[1] > 1:
        sum_tensor_over_ranks_(sq_norm)
    sq_norm += _sq_norm(plain, device)
    if sharded:
        sq_norm += sharded_norm(sharded).to(sq_norm).square()
    norm = sq_norm.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    plain += [p.grad for p in experts if p.grad is not None]
    for place in {grad.device for grad in plain}:
        torch._foreach_mul_([grad for grad in plain if grad.device == place], factor.to(place))
    for grad in sharded:
        grad.mul_(factor.to(grad.device))
    return norm


def grad_scaler(device: str | None = None, **options) -> torch.amp.GradScaler:
    """A GradScaler for fp16 training: an overflow on one rank makes all ranks skip the step.

    With torch's own each rank checks its own gradients: an expert's inf is seen on one rank only,
    and the ranks' scales and weights part.

    Args:
        device: ``cuda`` or ``cpu``; by default where GPUs are, a GPU.
        options: of ``torch.amp.GradScaler`` (init_scale, growth_interval, ...).
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    make = torch.amp.GradScaler if process_world()[1] == 1 else sharded_grad_scaler
    return make(device, **options)


def _sq_norm_of_copies(
    params: Iterable[nn.Parameter], groups: ExpertParallelGroups, device: torch.device
) -> torch.Tensor:
    """fp64 scalar whose sum over all ranks is ``num_replicas`` times the squared norm."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    grads = [(copies_of(p, groups), p.grad) for p in params if p.grad is not None]
    for copies in {copies for copies, _ in grads}:
        of_these = [grad for count, grad in grads if count == copies]
        total += _sq_norm(of_these, device) * (groups.num_replicas / copies)
    return total


def _sq_norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """fp64 scalar; norms of half gradients are taken in fp32, since they may be out of range."""
    half = [grad for grad in grads if grad.dtype.itemsize == 2]
    rest = [grad for grad in grads if grad.dtype.itemsize > 2]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in half]
    norms += torch._foreach_norm(rest) if rest else []
    norms = [torch.zeros((), device=device), *norms]
    return torch.stack([norm.to(device).double() for norm in norms]).square().sum()
