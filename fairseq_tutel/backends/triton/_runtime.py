"""Helpers of all launchers: the interpreter flag, argument checks, the device guard."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

# True if the kernels of this process run in Triton's CPU interpreter (fixed at import).
INTERPRET = bool(triton.knobs.runtime.interpret)

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP32 = (torch.float32,)
INT32 = (torch.int32,)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise ValueError unless the tensor has the shape, one of the dtypes, and the device."""
    given = tensor.device
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be one of {names}, got {tensor.dtype}")
    if given != device:
        raise ValueError(f"{name} is on {given}, the other arguments on {device}")
    if not INTERPRET and given.type == "cpu":
        raise ValueError(f"{name} is on the CPU, where Triton runs only with TRITON_INTERPRET=1")


def checked(name: str, tensor: Tensor | None, *wanted) -> Tensor | None:
    """Check a tensor (:func:`check_tensor`) and return it contiguous; None stays None."""
    if tensor is None:
        return None
    check_tensor(name, tensor, *wanted)
    return tensor.contiguous()


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Return a context that launches kernels on the tensor's GPU, not on the current one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()  # the usual case: a guard would ask for and set the device twice
    return torch.cuda.device(tensor.device)
