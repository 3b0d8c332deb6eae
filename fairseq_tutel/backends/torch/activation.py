"""The activations of the experts' hidden layer in plain torch."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_aten = torch.ops.aten


def _tanh_bwd(dy: Tensor, z: Tensor, out: Tensor) -> Tensor:
    return _aten.tanh_backward.grad_input(dy, z.tanh(), grad_input=out)


def _gelu(z: Tensor, out: Tensor, approximate: str = "none") -> Tensor:
    # Half of a gated network's values is not contiguous. Torch computes gelu of such by a slower
    # function with other last bits, so that the numbers would depend on how many rows there are;
    # and where only ``out`` is such a half, torch 2.13 leaves it as it was.
    if out.is_contiguous():
        return _aten.gelu.out(z.contiguous(), approximate=approximate, out=out)
    return out.copy_(_aten.gelu(z.contiguous(), approximate=approximate))


def _gelu_bwd(dy: Tensor, z: Tensor, out: Tensor, approximate: str = "none") -> Tensor:
    z, dy = z.contiguous(), dy.contiguous()
    if out.is_contiguous():
        return _aten.gelu_backward.grad_input(dy, z, approximate=approximate, grad_input=out)
    return out.copy_(_aten.gelu_backward(dy, z, approximate=approximate))


# name -> (activation of z, gradient from dy and z), both into ``out``, which may be z of the first
# and dy of the second; the names are those of fairseq's activations
_Function = Callable[[Tensor, Tensor], Tensor]
_Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
_GELU: tuple[_Function, _Gradient] = (_gelu, _gelu_bwd)
_GELU_TANH: tuple[_Function, _Gradient] = (
    partial(_gelu, approximate="tanh"),
    partial(_gelu_bwd, approximate="tanh"),
)
_SILU: tuple[_Function, _Gradient] = (
    lambda z, out: _aten.silu.out(z, out=out),
    lambda dy, z, out: _aten.silu_backward.grad_input(dy, z, grad_input=out),
)
ACTIVATIONS: dict[str, tuple[_Function, _Gradient]] = {
    "gelu": _GELU,
    "gelu_accurate": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "linear": (lambda z, out: out.copy_(z), lambda dy, z, out: out.copy_(dy)),
    "relu": (
        lambda z, out: torch.clamp(z, min=0, out=out),
        lambda dy, z, out: _aten.threshold_backward.grad_input(dy, z, 0, grad_input=out),
    ),
    "relu_squared": (
        lambda z, out: torch.clamp(z, min=0, out=out).square_(),
        lambda dy, z, out: torch.mul(dy, z.relu().mul_(2), out=out),
    ),
    "silu": _SILU,
    "swish": _SILU,
    "tanh": (lambda z, out: torch.tanh(z, out=out), _tanh_bwd),
}


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of everything but products: fp32 for halves."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
