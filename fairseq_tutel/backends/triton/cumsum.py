"""Cumulative sum minus one by a scan over blocks of tokens: Tutel's slot computation on a mask."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import SCAN_BLOCK_COLS, SCAN_BLOCK_ROWS
from ._runtime import check_tensor, device_guard
from .slots import scan_blocks

_DYNAMIC = ["num_tokens"]
_INT_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool)


@triton.jit(do_not_specialize=_DYNAMIC)
def _column_sums_kernel(
    sum_ptr,  # (B, E) int32 - output: sum over the rows of each block
    mask_ptr,  # (T, E) integer
    num_tokens,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B, cdiv(E, BLOCK_E)).

    Example: mask [[1], [0], [1]], BLOCK_T = 2 -> sum [[1], [1]].
    """
    block = tl.program_id(0).to(tl.int64)
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = (offs_t < num_tokens)[:, None] & (offs_e < E)[None, :]
    value = tl.load(mask_ptr + offs_t[:, None] * E + offs_e[None, :], mask=mask, other=0)
    total = tl.sum(value.to(tl.int32), axis=0)
    tl.store(sum_ptr + block * E + offs_e, total, mask=offs_e < E)


@triton.jit(do_not_specialize=_DYNAMIC)
def _cumsum_sub_one_kernel(
    out_ptr,  # (T, E) int32 - output
    mask_ptr,  # (T, E) integer
    before_ptr,  # (B, E) int32 - sum over all rows before each block; HAS_BEFORE
    num_tokens,
    E: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B, cdiv(E, BLOCK_E)).

    Example: mask [[1], [0], [1]] without earlier blocks -> [[0], [0], [1]].
    """
    block = tl.program_id(0).to(tl.int64)
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = (offs_t < num_tokens)[:, None] & (offs_e < E)[None, :]
    offs = offs_t[:, None] * E + offs_e[None, :]
    value = tl.load(mask_ptr + offs, mask=mask, other=0).to(tl.int32)
    result = tl.cumsum(value, axis=0) - 1
    if HAS_BEFORE:
        before = tl.load(before_ptr + block * E + offs_e, mask=offs_e < E, other=0)
        result += before[None, :]
    tl.store(out_ptr + offs, result, mask=mask)


def fast_cumsum_sub_one(mask_TE: Tensor) -> Tensor:
    """:func:`fairseq_tutel.backends.torch.fast_cumsum_sub_one` in Triton.

    Raises:
        ValueError: not an integer or bool mask, or wrong device.
    """
    T, E = mask_TE.shape
    check_tensor("mask", mask_TE, (T, E), _INT_DTYPES)
    out_TE = torch.empty((T, E), dtype=torch.int32, device=mask_TE.device)
    if out_TE.numel() == 0:
        return out_TE
    mask_TE = mask_TE.contiguous()
    block_t = 2 * SCAN_BLOCK_ROWS
    num_blocks = triton.cdiv(T, block_t)
    grid = (num_blocks, triton.cdiv(E, SCAN_BLOCK_COLS))
    sum_BE = None
    with device_guard(mask_TE):
        if num_blocks > 1:
            sum_BE = out_TE.new_empty((num_blocks, E))
            _column_sums_kernel[grid](
                sum_BE, mask_TE, T, E=E, BLOCK_T=block_t, BLOCK_E=SCAN_BLOCK_COLS
            )
            scan_blocks(sum_BE[None])
        _cumsum_sub_one_kernel[grid](
            out_TE,
            mask_TE,
            sum_BE,
            T,
            E=E,
            HAS_BEFORE=sum_BE is not None,
            BLOCK_T=block_t,
            BLOCK_E=SCAN_BLOCK_COLS,
        )
    return out_TE
