"""Operator of the experts' hidden layer: bias + activation + dropout, fused each way.

Legend: e local experts, N rows per expert, R rows, F hidden dim.
"""

from typing import Optional

import torch
from torch import Tensor

from fairseq_tutel.backends.torch import ACTIVATIONS

from .backend import implementation


@torch.library.custom_op("fairseq_tutel::bias_act", mutates_args=())
def _bias_act(
    h: Tensor,
    bias: Tensor,
    offsets: Optional[Tensor],
    seed: Optional[Tensor],
    activation: str,
    dropout_p: float,
) -> Tensor:
    return implementation("bias_act_fwd", h)(
        h, bias, activation=activation, offsets=offsets, dropout_p=dropout_p, seed=seed
    )


@_bias_act.register_fake
def _(h, bias, offsets, seed, activation, dropout_p):
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@torch.library.custom_op("fairseq_tutel::bias_act_bwd", mutates_args=())
def _bias_act_bwd(
    dy: Tensor,
    h: Optional[Tensor],
    bias: Tensor,
    offsets: Optional[Tensor],
    seed: Optional[Tensor],
    activation: str,
    dropout_p: float,
    needs_h: bool = True,
) -> tuple[Tensor, Tensor]:
    return implementation("bias_act_bwd", dy)(
        dy,
        h,
        bias,
        activation=activation,
        offsets=offsets,
        dropout_p=dropout_p,
        seed=seed,
        needs_h=needs_h,
    )


@_bias_act_bwd.register_fake
def _(dy, h, bias, offsets, seed, activation, dropout_p, needs_h=True):
    d_h = dy.new_empty(dy.shape if needs_h else (0,))
    return d_h, torch.empty_like(bias, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    h, bias, offsets, seed, ctx.activation, ctx.dropout_p = inputs
    # the derivative of linear is 1 whatever h was
    ctx.save_for_backward(None if ctx.activation == "linear" else h, bias, offsets, seed)


def _backward(ctx, dy):
    h, bias, offsets, seed = ctx.saved_tensors
    needs_h, needs_bias = ctx.needs_input_grad[:2]
    # A gradient is handed on as it came where it does not change: no dropout, and no tail to zero.
    same = ctx.activation == "linear" and ctx.dropout_p == 0.0 and offsets is None
    d_h = dy if needs_h and same else None
    d_bias = None
    computes_h = needs_h and not same
    if computes_h or needs_bias:
        new_h, d_bias = _bias_act_bwd(
            dy, h, bias, offsets, seed, ctx.activation, ctx.dropout_p, computes_h
        )
        d_h = new_h if computes_h else d_h
    return d_h, d_bias if needs_bias else None, None, None, None, None


_bias_act.register_autograd(_backward, setup_context=_setup)


def check_activation(activation: str, dropout_p: float) -> None:
    """Raise ValueError for an unknown activation or a dropout probability outside [0, 1)."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def dropout_seed(
    dropout_p: float, seed: Tensor | int | None, device: torch.device
) -> Tensor | None:
    """The seed as an int64 scalar tensor, drawn where there is none; None without dropout."""
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**31, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        # filled by a kernel: a copy from host memory would wait for all work of the GPU
        return torch.full((), seed, dtype=torch.int64, device=device)
    return seed


def _check(
    h: Tensor, bias: Tensor, activation: str, offsets: Tensor | None, dropout_p: float
) -> None:
    check_activation(activation, dropout_p)
    if h.dim() != (3 if offsets is None else 2):
        raise ValueError(
            f"h must be (experts, rows, hidden), or (rows, hidden) with offsets; "
            f"got {tuple(h.shape)} with offsets {offsets is not None}"
        )
    num_experts = h.shape[0] if offsets is None else offsets.shape[0]
    if bias.shape != (num_experts, h.shape[-1]):
        raise ValueError(f"bias must be {(num_experts, h.shape[-1])}, got {tuple(bias.shape)}")
    if offsets is not None and offsets.dtype != torch.int32:
        raise ValueError(f"offsets must be int32, got {offsets.dtype}")


def bias_act(
    h: Tensor,
    bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
) -> Tensor:
    """dropout(activation(h + bias)), computed in fp32, returned in the dtype of h.

    Saves h and recomputes the rest in the backward; ``linear`` saves no h, and without dropout and
    offsets it passes the gradient on as it is. ``gelu`` is the exact (erf) one.

    Args:
        h: (e, N, F), or (R, F) with ``offsets``; differentiable.
        bias: (e, F); differentiable.
        activation: gelu, gelu_accurate / gelu_fast (tanh form), relu, relu_squared,
            silu / swish, tanh or linear, as fairseq names them.
        offsets: (e,) int32 end row of each expert; rows past the last come out zero.
        dropout_p: probability of zeroing an element, 0 <= p < 1.
        seed: of the dropout mask, an int or an int64 scalar tensor on h's device; drawn from
            torch's generator when None.

    Raises:
        ValueError: unknown activation, dropout_p out of range, wrong shapes.
    """
    _check(h, bias, activation, offsets, dropout_p)
    seed = dropout_seed(dropout_p, seed, h.device)
    return _bias_act(h, bias, offsets, seed, activation, dropout_p)
