"""One gradient rule, one norm and one overflow check for dense parameters and experts.

Notation: g_r is the gradient of rank r's summed loss. fairseq averages dense gradients over the W
ranks and later multiplies by W / sample_size, so every gradient should leave this step as
``sum_r g_r / W``.

An expert's gradient already holds the sum over all ranks that sent it tokens (the all-to-all's
backward adds them), so it is divided, never averaged: by W with normalisation ``world_size``, by
sqrt(W) with ``sqrt_world_size`` (fairseq's README.moe.md; expert gradients are then sqrt(W) larger
than the true ones). With replicas, each holds the sum over its block only: they are averaged first
and the divisor is the size of a block, which for ``world_size`` is again the sum over all ranks /
W. With E < W experts, blocks of E ranks are as large as can be and ``sqrt_world_size`` divides by
sqrt(E); smaller blocks, if they are chosen, change no gradient.

Where experts are in S slices, the gradient of a slice is the sum over all W ranks at once, so it is
divided by S in place of being averaged; fc2's bias, of which each holder has a copy, gets a part of
the gradient on some holders, so that it is summed like a replica's. What decides is the number of
copies of a parameter (:func:`~fairseq_tutel.distributed.copies_of`).
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
from .model import moe_layers, unwrap


@torch.no_grad()
def average_expert_grad(
    grad: torch.Tensor, groups: ExpertParallelGroups, copies: int | None = None
) -> torch.Tensor:
    """What DistributedDataParallel does to dense gradients, for one gradient of an expert.

    Args:
        grad: sum over the tokens that this rank's experts received. Collective with copies.
        copies: of the parameter; by default as many as the ranks that hold its expert.

    Returns:
        The sum over all ranks divided by their number.
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
    :func:`~fairseq_tutel.hosts.prepare_data_parallel`, which does it as they arrive.

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
    grads = [param.grad for param in experts if param.grad is not None]
    if grads:
        torch._foreach_mul_(grads, scale)  # one launch for all of them
    for param in experts:
        if param.grad is None:
            # replicas must take part in the same collectives
            param.grad = torch.zeros_like(param)
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
def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a model with experts on several ranks. Collective.

    The norm is over the dense parameters and all experts of all ranks, replicas counted once, so
    that it is that of one process with all experts, and the same on every rank. (With torch's own,
    each rank clips by its own experts' gradients, and the dense weights of the ranks drift apart.)

    Args:
        model: wrapped or not; the gradients of all its parameters are clipped, in place. They are
            reduced already, as :func:`~fairseq_tutel.hosts.wrap_data_parallel` does, and unscaled.
        max_norm: largest L2 norm; ``float("inf")`` only measures it.
        error_if_nonfinite: raise, on all ranks, where the norm is inf or nan.

    Returns:
        The norm before clipping, fp32 scalar.

    Raises:
        RuntimeError: it is not finite and ``error_if_nonfinite``.
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
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of the gradients is {norm.item()}, so it cannot be clipped; "
            "error_if_nonfinite=False goes on"
        )
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
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if process_world()[1] == 1:
        return torch.amp.GradScaler(device, **options)
    return sharded_grad_scaler(device, **options)


def _sq_norm_of_copies(
    params: Iterable[nn.Parameter], groups: ExpertParallelGroups, device: torch.device
) -> torch.Tensor:
    """fp64 scalar whose sum over all ranks is ``num_replicas`` times the squared norm."""
    grads: dict[int, list[torch.Tensor]] = {}
    for param in params:
        if param.grad is not None:
            grads.setdefault(copies_of(param, groups), []).append(param.grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, of_these in grads.items():
        total += _sq_norm(of_these, device) * (groups.num_replicas / copies)
    return total


def _sq_norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """fp64 scalar; norms of half gradients are taken in fp32, since they may be out of range."""
    half = [grad for grad in grads if grad.dtype in (torch.float16, torch.bfloat16)]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in half]
    rest = [grad for grad in grads if grad.dtype not in (torch.float16, torch.bfloat16)]
    norms += torch._foreach_norm(rest) if rest else []
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.to(device).double() for norm in norms]).square().sum()
