"""Operator of the gate's product; its logits are never rounded to half."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..backends import torch as torch_backend
from ._operator import empty_gradients, is_plain_eager, operator, save_inputs
from .backend import backend_for, implementation


def _implementation(function: str, x: Tensor) -> Callable:
    """Return the backend's function, but torch's for fp32 (it is faster) and for zero tokens."""
    if x.dtype.itemsize > 2 or x.numel() == 0:
        return getattr(torch_backend, function)
    return implementation(function, x)


def _fake_logits(x, weight):
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _flops(_, x, weight):
    return 2 * x.numel() * weight.shape[0]


def _flops_bwd(_, d_logits, x, weight, needs_x, needs_weight):
    return (needs_x + needs_weight) * _flops(_, x, weight)


@operator("gate_logits", _fake_logits, flops=_flops)
def _gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    return _implementation("gate_logits_fwd", x)(x, weight)


@operator(
    "gate_logits_bwd",
    lambda d_logits, x, weight, *needs: empty_gradients((x, weight), needs),
    flops=_flops_bwd,
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


def _check(x_TM: Tensor, weight_EM: Tensor) -> None:
    if x_TM.dim() != 2 or weight_EM.dim() != 2 or x_TM.shape[1] != weight_EM.shape[1]:
        raise ValueError(
            f"tokens {tuple(x_TM.shape)} and weight {tuple(weight_EM.shape)} must be (tokens, "
            "model_dim) and (experts, model_dim)"
        )
    under_autocast = x_TM.dtype.itemsize == 2 and weight_EM.dtype == torch.float32
    if x_TM.dtype != weight_EM.dtype and not under_autocast:
        raise ValueError(f"tokens are {x_TM.dtype}, the weight is {weight_EM.dtype}")


def gate_logits(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in fp32, also for tokens in half precision.

    Gradients are rounded once, at the end, to the dtypes of tokens and weight. The weight has the
    tokens' dtype, or fp32 with half tokens (autocast). Logits (T, E) of fp64 are fp64.
    """
    _check(x_TM, weight_EM)
    return _gate_logits(x_TM, weight_EM)


class _LogitsAndTokens(torch.autograd.Function):
    """The gate's logits, and the tokens for all other uses, whose gradient the gate adds to."""

    @staticmethod
    def forward(ctx, x_TM, weight_EM):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TM, weight_EM)
        return _gate_logits(x_TM, weight_EM), x_TM.view_as(x_TM)

    @staticmethod
    def backward(ctx, d_logits, d_tokens):
        if d_logits is None:
            return d_tokens, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        given = d_logits, x, weight
        if d_tokens is None or not needs_x:
            return _backward(ctx, d_logits)
        in_place = d_tokens.is_contiguous() and not torch.is_grad_enabled()
        if not (in_place and is_plain_eager(given, [*given, d_tokens])):
            d_x, d_weight = _backward(ctx, d_logits)
            return d_tokens + d_x, d_weight
        gradients = implementation("gate_logits_bwd", x)
        _, d_weight = gradients(*given, needs_weight=needs_weight, onto_TM=d_tokens)
        return d_tokens, d_weight if needs_weight else None


def gate_logits_and_tokens(x_TM: Tensor, weight_EM: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return :func:`gate_logits`, and the tokens for their other use, or None: use ``x_TM``.

    Use these tokens once, as the argument of an operator of this package. In the backward pass the
    gate's product adds to their gradient in place, which saves a pass over the tokens on a GPU.
    """
    given = x_TM, weight_EM
    adds = torch.is_grad_enabled() and x_TM.requires_grad and x_TM.numel() > 0
    in_kernels = x_TM.dtype.itemsize == 2 and backend_for(x_TM.device) == "triton"
    if torch.compiler.is_compiling() or not (adds and in_kernels and is_plain_eager(given, given)):
        return gate_logits(*given), None
    _check(*given)
    return _LogitsAndTokens.apply(*given)
