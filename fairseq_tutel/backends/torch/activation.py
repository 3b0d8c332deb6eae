"""The activations of the experts' hidden layer in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor

_aten = torch.ops.aten


def _tanh_bwd(dy: Tensor, z: Tensor, out: Tensor) -> Tensor:
    return _aten.tanh_backward.grad_input(dy, z.tanh(), grad_input=out)


# fairseq's name -> (activation of z, gradient from dy and z). Both write to ``out``, which may be z
# for the first and dy for the second. All must be contiguous: for another z gelu is slower and has
# other last bits, and torch 2.13 does not write to another ``out``.
_Function = Callable[[Tensor, Tensor], Tensor]
_Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
_GELU: tuple[_Function, _Gradient] = (
    lambda z, out: _aten.gelu.out(z, out=out),
    lambda dy, z, out: _aten.gelu_backward.grad_input(dy, z, grad_input=out),
)
_GELU_TANH: tuple[_Function, _Gradient] = (
    lambda z, out: _aten.gelu.out(z, approximate="tanh", out=out),
    lambda dy, z, out: _aten.gelu_backward.grad_input(dy, z, approximate="tanh", grad_input=out),
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
    """Return the dtype of everything but products: fp32 for halves."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
