"""Rows and weights of (token, choice) pairs as device functions of the dispatch kernels.

A tile has BLOCK_T tokens; M is the model dim.
"""

import triton
import triton.language as tl

# Up to this top-k a token's rows are written out one after the other, so that the loads of all are
# under way at once; their indices and weights are then loaded before the loop over M.
MAX_UNROLL = tl.constexpr(4)


@triton.jit
def load_pair(
    dest_row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K: tl.constexpr, HAS_WEIGHT: tl.constexpr
):
    """Row (int64, -1 = dropped) and fp32 weight of choice k of a tile of tokens.

    The weight of a dropped pair may be anything, NaN included; it counts as 0.
    """
    offs = offs_t * TOP_K + k
    row = tl.load(dest_row_ptr + offs, mask=mask_t, other=-1)
    weight = tl.full(row.shape, 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + offs, mask=row >= 0, other=0.0).to(tl.float32)
    return row.to(tl.int64), weight


@triton.jit
def load_rows(rows_ptr, row, offs_m, M: tl.constexpr):
    """A tile of rows (tokens x columns), 0 for dropped pairs."""
    mask = (row >= 0)[:, None] & (offs_m < M)[None, :]
    return tl.load(rows_ptr + row[:, None] * M + offs_m[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(rows_ptr, x, row, weight, offs_m, M: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """weight * x into a tile of rows; nothing for dropped pairs."""
    value = x
    if HAS_WEIGHT:
        value = x.to(tl.float32) * weight[:, None]
    mask = (row >= 0)[:, None] & (offs_m < M)[None, :]
    offs = row[:, None] * M + offs_m[None, :]
    tl.store(rows_ptr + offs, value.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_dot(dot, a, b, k):
    """Adds <a, b> of a tile of tokens to column k of their sums."""
    part = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    offs_k = tl.arange(0, dot.shape[1])
    return dot + tl.where(offs_k[None, :] == k, part[:, None], 0.0)
