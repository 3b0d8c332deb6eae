"""What a layer needs for a few tokens on a CPU, without gradients: plain functions.

On so few rows the registration of an operator costs more than what it computes. There is no other
backend's: on a GPU nothing of the usual operators waits for the host, so that a CUDA graph holds
them all.
"""

import torch
from torch import Tensor

from ..backends.torch import (
    FewRows,
    arrange_few,
    choose_few,
    expert_ffn_few,
    expert_ffn_int8,
)
from .backend import backend_for

# pairs up to which sorting them one by one takes less than a hundredth of the experts' products
MOST_PAIRS = 256


def takes_few(x_TM: Tensor, top_k: int) -> bool:
    """Whether these functions are for so many tokens, on this device and backend."""
    few = x_TM.shape[0] * top_k <= MOST_PAIRS
    return few and is_eager_on_cpu(x_TM) and backend_for(x_TM.device) == "torch"


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether Python may read values, and call what computes an operator in its place: on a CPU,
    without gradients, and not in a trace.
    """
    plain = type(x) is Tensor and x.device.type == "cpu" and not torch.is_grad_enabled()
    return plain and not torch.compiler.is_compiling()


__all__ = [
    "FewRows",
    "arrange_few",
    "choose_few",
    "expert_ffn_few",
    "expert_ffn_int8",
    "is_eager_on_cpu",
    "takes_few",
]
