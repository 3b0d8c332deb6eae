"""Rows as bytes for the wire, and back, in one launch each; formats: ``config/formats.py``.

Rows of fp8 products have one scale each, too.

The 8-bit formats are made of integer operations, so that every GPU makes the same bytes, also one
without instructions for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config.formats import (
    BLOCK,
    CARRY_ABOVE_7_4,
    NOT_FINITE,
    WIRE_FORMATS,
    WireFormat,
    num_blocks,
)
from .._fp8 import FP8
from ._autotune import FP8_BLOCK, WIRE_ROWS
from ._runtime import FLOAT_DTYPES, check_tensor, checked, device_guard
from ._sizes import cdiv, next_power_of_2

_DYNAMIC = ["num_rows"]
_CARRY = tl.constexpr(CARRY_ABOVE_7_4)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_FP16_MAX = tl.constexpr(torch.finfo(torch.float16).max)
_E4M3_MAX = tl.constexpr(torch.finfo(FP8).max)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def to_8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round fp32 within the format's range to 8 bits, to nearest, ties to even; returns int32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # normal numbers: round the mantissa, then the other bias
    SHIFT: tl.constexpr = 23 - MANTISSA
    odd = (magnitude >> SHIFT) & 1
    normal = ((magnitude + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # smaller ones: the sum's last bit is worth as much as the format's
    MAGIC: tl.constexpr = (1 - BIAS - MANTISSA + 23 + 127) << 23
    magic = tl.full([1], MAGIC, tl.int32).to(tl.float32, bitcast=True)
    total = tl.abs(x) + magic
    small = total.to(tl.int32, bitcast=True) - MAGIC
    SMALLEST_NORMAL: tl.constexpr = (1 - BIAS + 127) << 23
    value = tl.where(magnitude < SMALLEST_NORMAL, small, normal)
    return value | ((bits >> 24) & 0x80)


@triton.jit
def from_8_bits(byte, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Invert :func:`to_8_bits`: int32 to fp32."""
    magnitude = byte & 0x7F
    normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    unit = tl.full([1], (1 - BIAS - MANTISSA + 127) << 23, tl.int32).to(tl.float32, bitcast=True)
    small = magnitude.to(tl.float32) * unit
    value = tl.where(magnitude < (1 << MANTISSA), small, normal.to(tl.float32, bitcast=True))
    return tl.where((byte & 0x80) != 0, -value, value)


@triton.jit
def _scale_of_byte(byte):
    """Return the fp32 scale of an int32 scale byte; NaN for 255."""
    quiet = tl.where(byte == _NOT_FINITE, 1 << 22, 0)
    return ((byte << 23) | quiet).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_DYNAMIC)
def _encode_rows_kernel(
    value_ptr,  # (R, stride_value) of some dtype - output, the bytes of the rows
    scale_ptr,  # (R, stride_scale) uint8 - output, the same from the first scale on; not bf16
    partial_ptr,  # (P, 2) fp32 - output: sums of squared errors and of squares
    rows_ptr,  # (R, M) float
    num_rows,
    stride_value,
    stride_scale,
    M: tl.constexpr,
    B: tl.constexpr,
    NUM_SCALES: tl.constexpr,  # B and the padding
    SCALED: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (cdiv(R, BLOCK_N),).

    Example: row [448, -3, 0.5] as e4m3 -> values [0x7E, 0xC4, 0x30], scale 127 (2^0), no error.
    """
    pid = tl.program_id(0).to(tl.int64)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    error = tl.zeros([BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, M, BLOCK):
        block = start // BLOCK
        offs_m = start + tl.arange(0, BLOCK)
        mask = mask_n[:, None] & (offs_m < M)[None, :]
        x = tl.load(rows_ptr + offs_n[:, None] * M + offs_m[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        offs_value = offs_n[:, None] * stride_value + offs_m[None, :]
        finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITY_BITS
        if SCALED:
            bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
            usable = bits < _INFINITY_BITS
            byte = tl.maximum(((bits + _CARRY) >> 23) - EXPONENT, 1)
            inverse = tl.where(usable, (254 - byte) << 23, 0).to(tl.float32, bitcast=True)
            byte = tl.where(usable, byte, _NOT_FINITE)
            scaled = x * inverse[:, None]
            if MANTISSA > 0:
                value = to_8_bits(scaled, MANTISSA, BIAS)
                tl.store(value_ptr + offs_value, value.to(tl.uint8), mask=mask)
                arrived = from_8_bits(value, MANTISSA, BIAS)
            else:
                value = scaled.to(tl.float16)
                tl.store(value_ptr + offs_value, value, mask=mask)
                arrived = value.to(tl.float32)
            tl.store(scale_ptr + offs_n * stride_scale + block, byte.to(tl.uint8), mask=mask_n)
            arrived = arrived * _scale_of_byte(byte)[:, None]
            finite = finite & usable[:, None]
        else:
            value = x.to(tl.bfloat16)
            tl.store(value_ptr + offs_value, value, mask=mask)
            arrived = value.to(tl.float32)
        difference = tl.where(finite, arrived - x, 0.0)
        error += tl.sum(difference * difference, axis=1)
        kept = tl.where(finite, x, 0.0)
        square += tl.sum(kept * kept, axis=1)
    if SCALED:
        zero = tl.zeros([BLOCK_N], tl.uint8)
        for scale in range(B, NUM_SCALES):
            tl.store(scale_ptr + offs_n * stride_scale + scale, zero, mask=mask_n)
    tl.store(partial_ptr + 2 * pid, tl.sum(error, axis=0))
    tl.store(partial_ptr + 2 * pid + 1, tl.sum(square, axis=0))


@triton.jit(do_not_specialize=_DYNAMIC)
def _decode_rows_kernel(
    rows_ptr,  # (R, M) float - output
    value_ptr,  # (R, stride_value) of some dtype - the bytes of the rows
    scale_ptr,  # (R, stride_scale) uint8 - the same from the first scale on
    num_rows,
    stride_value,
    stride_scale,
    M: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,  # fp16, whose largest numbers may have been rounded up
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (cdiv(R, BLOCK_N),).

    Example: values [0x7E, 0xC4, 0x30] of e4m3, scale 128 (2^1) -> row [896, -6, 1].
    """
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    for start in range(0, M, BLOCK):
        block = start // BLOCK
        offs_m = start + tl.arange(0, BLOCK)
        mask = mask_n[:, None] & (offs_m < M)[None, :]
        value = tl.load(
            value_ptr + offs_n[:, None] * stride_value + offs_m[None, :], mask=mask, other=0
        )
        if MANTISSA > 0:
            x = from_8_bits(value.to(tl.int32), MANTISSA, BIAS)
        else:
            x = value.to(tl.float32)
        byte = tl.load(scale_ptr + offs_n * stride_scale + block, mask=mask_n, other=1)
        x = x * _scale_of_byte(byte.to(tl.int32))[:, None]
        if CLAMP:  # comparisons leave a NaN as it is
            x = tl.where(x > _FP16_MAX, _FP16_MAX, tl.where(x < -_FP16_MAX, -_FP16_MAX, x))
        row = x.to(rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + offs_n[:, None] * M + offs_m[None, :], row, mask=mask)


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
    scale = tl.maximum(bits.to(tl.float32, bitcast=True) / _E4M3_MAX, _TINY)
    scale = tl.where(bits < _INFINITY_BITS, scale, float("nan"))
    tl.store(scale_ptr + tl.program_id(0), scale)
    for start in range(0, A, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(rows_ptr + row + offs, mask=offs < A, other=0.0).to(tl.float32)
        value = to_8_bits(x / scale, 3, 7)
        tl.store(value_ptr + row + offs, value.to(tl.uint8), mask=offs < A)


def encode_rows(rows_RM: Tensor, wire_format: str) -> tuple[Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.encode_rows` in Triton; measures all errors."""
    (R, M), device = rows_RM.shape, rows_RM.device
    rows_RM = checked("rows", rows_RM, (R, M), FLOAT_DTYPES, device)
    chosen = WIRE_FORMATS[wire_format]
    wire_RD = torch.empty((R, chosen.num_bytes(M)), dtype=torch.uint8, device=device)
    if rows_RM.numel() == 0:
        return wire_RD, torch.zeros(2, dtype=torch.float32, device=device)
    num_programs = cdiv(R, WIRE_ROWS)
    partial_P2 = torch.empty((num_programs, 2), dtype=torch.float32, device=device)
    value, scale, sizes = _written_as(wire_RD, chosen, M)
    with device_guard(rows_RM):
        _encode_rows_kernel[(num_programs,)](
            value,
            scale,
            partial_P2,
            rows_RM,
            R,
            **sizes,
            B=num_blocks(M),
            NUM_SCALES=wire_RD.shape[1] - M * chosen.value_bytes,
            SCALED=chosen.exponent is not None,
            EXPONENT=chosen.exponent or 0,
        )
    return wire_RD, partial_P2.sum(0)


def decode_rows(wire_RD: Tensor, wire_format: str, out_RM: Tensor) -> Tensor:
    """Compute :func:`fairseq_tutel.backends.torch.decode_rows` in Triton."""
    (R, M), device = out_RM.shape, out_RM.device
    chosen = WIRE_FORMATS[wire_format]
    check_tensor("out", out_RM, (R, M), FLOAT_DTYPES, device)
    wire_RD = checked("wire", wire_RD, (R, chosen.num_bytes(M)), (torch.uint8,), device)
    if not out_RM.is_contiguous():
        raise ValueError(f"out of shape {(R, M)} must be contiguous: it is written in place")
    if out_RM.numel() == 0:
        return out_RM
    if chosen.exponent is None:
        return out_RM.copy_(wire_RD.view(getattr(torch, chosen.dtype)))
    value, scale, sizes = _written_as(wire_RD, chosen, M)
    with device_guard(wire_RD):
        _decode_rows_kernel[(cdiv(R, WIRE_ROWS),)](
            out_RM, value, scale, R, **sizes, CLAMP=out_RM.dtype == torch.float16
        )
    return out_RM


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


def _written_as(wire_RD: Tensor, chosen: WireFormat, M: int) -> tuple[Tensor, Tensor, dict]:
    """Return the bytes as values, those from the first scale on, and both kernels' sizes."""
    value = wire_RD.view(torch.uint8 if chosen.mantissa else getattr(torch, chosen.dtype))
    scale = wire_RD[:, M * chosen.value_bytes :]
    sizes = {"stride_value": value.stride(0), "stride_scale": scale.stride(0), "M": M}
    sizes |= {"MANTISSA": chosen.mantissa, "BIAS": chosen.bias}
    return value, scale, {**sizes, "BLOCK": BLOCK, "BLOCK_N": WIRE_ROWS}
