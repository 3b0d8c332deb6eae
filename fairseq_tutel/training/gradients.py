"""One gradient rule, one norm and one overflow check for dense parameters and experts.

g_r is the gradient of rank r's summed loss. Data parallelism averages dense gradients over the W
ranks, so every gradient should be ``sum_r g_r / W``. (fairseq multiplies by W / sample_size later.)

The all-to-all's backward pass already adds an expert's gradient over all ranks that sent it tokens.
So it is divided, not averaged: by W with normalisation ``world_size``, by sqrt(W) with
``sqrt_world_size`` (fairseq's README.moe.md). A replica has the sum over its block of ranks only:
replicas are averaged first, and the divisor is the size of a block. With E < W experts, the largest
blocks have E ranks and ``sqrt_world_size`` divides by sqrt(E). Smaller blocks change no gradient.

The gradient of a slice is the sum over all W ranks at once. Parameters that every holder of a slice
has (fc2's bias) are summed like replicas.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from .. import distributed
from ..config import EXPERT_GRAD_NORMALIZATIONS
from ..moe.model import moe_layers, unwrap


@torch.no_grad()
def average_expert_grad(
    grad: torch.Tensor, groups: distributed.ExpertParallelGroups, copies: int
) -> torch.Tensor:
    """Return the mean over all ranks of one expert gradient, as DDP does for dense gradients.

    ``copies`` is the number of ranks that hold the parameter; collective if there are several.
    """
    if groups.world_size == 1 or groups.simulated:
        return grad
    mean = grad / groups.world_size
    return mean if copies == 1 else distributed.sum_over_replicas_(mean, groups)


@torch.no_grad()
def reduce_expert_grads(
    params: Iterable[nn.Parameter],
    groups: distributed.ExpertParallelGroups,
    normalization: str = "world_size",
) -> None:
    """Average expert gradients over replicas and normalise them, in place. Collective.

    For hosts without :func:`~fairseq_tutel.training.prepare_data_parallel`, which reduces gradients
    as they arrive.

    Args:
        params (iterable of nn.Parameter): any parameters; only those of experts are changed.
        groups (ExpertParallelGroups): placement of the experts.
        normalization (str): divisor of the sum over all ranks: ``world_size`` (default) or
            ``sqrt_world_size``, its square root.
    """
    if normalization not in EXPERT_GRAD_NORMALIZATIONS:
        known = ", ".join(EXPERT_GRAD_NORMALIZATIONS)
        raise ValueError(f"normalization={normalization!r} is unknown; choose one of {known}")
    if groups.world_size == 1 or groups.simulated:
        return
    block = min(groups.num_experts, groups.world_size)
    divisor = block if normalization == "world_size" else math.sqrt(block)
    scale = 1.0 / (divisor * (groups.world_size / block))
    grads, copied = [], []
    for param in params:
        if distributed.is_expert(param) and param.requires_grad:
            distributed.note_reduction(param)
            if param.grad is None:  # replicas must take part in the same collectives
                param.grad = torch.zeros_like(param)
            grads.append(param.grad)
            if distributed.copies_of(param, groups) > 1:
                copied.append(param.grad)
    _scale_(grads, scale)
    for grad in copied:
        distributed.sum_over_replicas_(grad, groups)


@torch.no_grad()
def expert_grad_sq_norm(
    params: Iterable[nn.Parameter], groups: distributed.ExpertParallelGroups
) -> torch.Tensor:
    """Return the squared L2 norm of the gradients of all E experts. Collective.

    Args:
        params (iterable of nn.Parameter): this rank's parameters; those of experts count.
        groups (ExpertParallelGroups): placement of the experts.

    Returns:
        Tensor: fp32 scalar, the same on every rank; inf or nan if any rank has one.
    """
    params = list(params)
    device = params[0].device if params else torch.device("cpu")
    total = _sq_norm_of_copies(
        [p for p in params if distributed.is_expert(p)], groups, device
    ).float()
    if groups.world_size > 1 and not groups.simulated:
        distributed.sum_tensor_over_ranks_(total)
        total /= groups.num_replicas
    return total


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradients of a model by one L2 norm over all ranks, in place. Collective.

    The norm is that of one process with all experts. Call it when gradients are reduced
    (:func:`~.data_parallel.wrap_data_parallel` does it) and unscaled.

    Args:
        model (nn.Module): the model, wrapped or not, with or without MoE layers.
        max_norm (float): the largest norm; ``float("inf")`` only measures.

    Returns:
        Tensor: the norm before clipping, fp32 scalar, the same on every rank.
    """
    model = unwrap(model)
    layers = moe_layers(model).values()
    experts = {param for layer in layers for param in layer.experts.parameters()}
    dense = [p.grad for p in model.parameters() if p not in experts and p.grad is not None]
    plain = [grad for grad in dense if not distributed.is_sharded(grad)]
    sharded = [grad for grad in dense if distributed.is_sharded(grad)]
    device = next(model.parameters()).device
    sq_norm = torch.zeros((), dtype=torch.float64, device=device)
    for layer in layers:
        total = _sq_norm_of_copies(layer.experts.parameters(), layer.groups, device)
        sq_norm += total / layer.groups.num_replicas
    distributed.sum_tensor_over_ranks_(sq_norm)
    sq_norm += _sq_norm(plain, device)
    if sharded:
        sq_norm += distributed.sharded_norm(sharded).to(sq_norm).square()
    norm = sq_norm.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    plain += [p.grad for p in experts if p.grad is not None]
    for place in {grad.device for grad in plain}:
        _scale_([grad for grad in plain if grad.device == place], factor.to(place))
    for grad in sharded:
        grad.mul_(factor.to(grad.device))
    return norm


def grad_scaler(device: str | None = None, **options) -> torch.amp.GradScaler:
    """Return a GradScaler for fp16 training: an overflow on one rank makes all ranks skip the step.

    With torch's own GradScaler only the rank of an expert sees the expert's inf, so that scales and
    weights of the ranks diverge.

    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=4)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> scaler = grad_scaler("cpu", init_scale=8.0)
    >>> scaler.scale(layer(torch.randn(16, 8)).square().mean()).backward()
    >>> scaler.unscale_(optimizer)
    >>> norm = clip_grad_norm_(layer, 1.0)
    >>> _ = scaler.step(optimizer)
    >>> scaler.update()

    Args:
        device (str): ``cuda`` or ``cpu`` (default: ``cuda`` if there is a GPU).
        **options: arguments of ``torch.amp.GradScaler``, such as ``init_scale`` (default: torch's).

    Returns:
        torch.amp.GradScaler: its step is collective on several ranks.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if distributed.process_world()[1] == 1 or not options.get("enabled", True):
        return torch.amp.GradScaler(device, **options)
    return distributed.sharded_grad_scaler(device, **options)


def _scale_(grads: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors of one device in place, in one launch."""
    if grads:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def _sq_norm_of_copies(
    params: Iterable[nn.Parameter], groups: distributed.ExpertParallelGroups, device: torch.device
) -> torch.Tensor:
    """Return an fp64 scalar; summed over all ranks: ``num_replicas`` times the squared norm."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    grads = [(distributed.copies_of(p, groups), p.grad) for p in params if p.grad is not None]
    for copies in {copies for copies, _ in grads}:
        of_these = [grad for count, grad in grads if count == copies]
        total += _sq_norm(of_these, device) * (groups.num_replicas / copies)
    return total


def _sq_norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the squared L2 norm, fp64 scalar. Half gradients have fp32 norms: fp16 overflows."""
    half = [grad for grad in grads if grad.dtype.itemsize == 2]
    rest = [grad for grad in grads if grad.dtype.itemsize > 2]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in half]
    if rest:
        norms += torch._foreach_norm(rest)  # pyright: ignore[reportPrivateImportUsage]
    norms = [torch.zeros((), device=device), *norms]
    return torch.stack([norm.to(device).double() for norm in norms]).square().sum()
