"""Rows rounded to fp8 (e4m3) with one scale per row, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._fp8 import FP8
from ._autotune import FP8_BLOCK
from ._runtime import FLOAT_DTYPES, checked, device_guard
from ._sizes import next_power_of_2
from .wire import INFINITY_BITS, to_8_bits

_LARGEST = tl.constexpr(torch.finfo(FP8).max)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _quantize_rows_kernel(
    value_ptr,  # (R, A) uint8 - output, e4m3
    scale_ptr,  # (R,) fp32 - output
    rows_ptr,  # (R, A) float
    A: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R,): a program finds its row, which it reads again, in the cache.

    Example: row [896, -6, 1] -> values [0x7E, 0xC4, 0x30], scale 2.
    """
    row = tl.program_id(0).to(tl.int64) * A
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, A, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(rows_ptr + row + offs, mask=offs < A, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(largest, axis=0)
    scale = tl.maximum(bits.to(tl.float32, bitcast=True) / _LARGEST, _TINY)
    scale = tl.where(bits < INFINITY_BITS, scale, float("nan"))
    tl.store(scale_ptr + tl.program_id(0), scale)
    for start in range(0, A, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(rows_ptr + row + offs, mask=offs < A, other=0.0).to(tl.float32)
        value = to_8_bits(x / scale, 3, 7)
        tl.store(value_ptr + row + offs, value.to(tl.uint8), mask=offs < A)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends._fp8.quantize_rows` in Triton, to e4m3.

    2 + 1 bytes per number of a half.
    """
    x = checked("rows", x, x.shape, FLOAT_DTYPES, x.device)
    value = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale, A = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device), x.shape[-1]
    if x.numel() > 0:
        with device_guard(x):
            _quantize_rows_kernel[(scale.numel(),)](
                value, scale, x, A=A, BLOCK=min(next_power_of_2(A), FP8_BLOCK)
            )
    return value.view(FP8), scale
