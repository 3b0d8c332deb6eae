"""Operator of the gate's product; its logits are never rounded to half."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..backends import torch as torch_backend
from ._operator import empty_gradients, operator, save_inputs
from .backend import implementation


def _implementation(function: str, x: Tensor) -> Callable:
    """Return the function; torch's own product computes fp32 best, and no tokens."""
    if x.dtype.itemsize > 2 or x.numel() == 0:
        return getattr(torch_backend, function)
    return implementation(function, x)


def _fake_logits(x, weight):
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@operator("gate_logits", _fake_logits)
def _gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    return _implementation("gate_logits_fwd", x)(x, weight)


@operator(
    "gate_logits_bwd", lambda d_logits, x, weight, *needs: empty_gradients((x, weight), needs)
)
def _gate_logits_bwd(
    d_logits: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    gradients = _implementation("gate_logits_bwd", x)
    return gradients(d_logits, x, weight, needs_x=needs_x, needs_weight=needs_weight)


def _backward(ctx, d_logits):
    needs_x, needs_weight = ctx.needs_input_grad
    d_x, d_weight = _gate_logits_bwd(d_logits, *ctx.saved_tensors, needs_x, needs_weight)
    return d_x if needs_x else None, d_weight if needs_weight else None


_gate_logits.register_autograd(_backward, setup_context=save_inputs)


def gate_logits(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in fp32, also for tokens in half precision.

    Gradients are rounded once, at the end, to the dtypes of tokens and weight.

    Args:
        x_TM: (T, M); differentiable.
        weight_EM: (E, M), of the same dtype, or fp32 with half tokens (autocast); differentiable.

    Returns:
        (T, E) in fp32 (fp64 of fp64).

    Raises:
        ValueError: wrong shapes or dtypes.
    """
    if x_TM.dim() != 2 or weight_EM.dim() != 2 or x_TM.shape[1] != weight_EM.shape[1]:
        raise ValueError(
            f"tokens {tuple(x_TM.shape)} and weight {tuple(weight_EM.shape)} must be (tokens, "
            "model_dim) and (experts, model_dim)"
        )
    under_autocast = x_TM.dtype.itemsize == 2 and weight_EM.dtype == torch.float32
    if x_TM.dtype != weight_EM.dtype and not under_autocast:
        raise ValueError(f"tokens are {x_TM.dtype}, the weight is {weight_EM.dtype}")
    return _gate_logits(x_TM, weight_EM)
