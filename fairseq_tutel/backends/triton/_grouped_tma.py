"""Grouped products of halves for Hopper and newer GPUs: persistent kernels with TMA loads.

Programs compute one tile after the other. Where one has a multiprocessor for itself, the loop is
flattened: the loads of the next tile begin before a tile is written. Of two programs one multiplies
while the other writes. Tensor descriptors read tiles without address arithmetic, and read zeros
past the end of a tensor, or of an expert's rows.

``_grouped.py`` has the products' interface and decides which implementation computes one.
A and B are the two dimensions of the weight.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from ._runtime import INT32, INTERPRET, checked, device_guard
from ._sizes import next_power_of_2
from ._tiles import ragged_tiles, token_of_row

# Neighbouring tiles of rows whose columns are computed together: their operands stay in the cache.
_GROUP = 8
# Programs in the interpreter: fewer than tiles, so that some compute several.
_INTERPRETED_PROGRAMS = 3


class Source(NamedTuple):
    """The tokens of rows that were never written: row r is token ``pair_R[r] // top_k``."""

    pair_R: Tensor  # (R,) int32, -1 in unused rows, which follow those of the experts
    top_k: int


def checked_source(source: Source | None, device: torch.device) -> Source | None:
    """Return the source with checked, contiguous pairs; None stays None."""
    if source is None:
        return None
    shape = (len(source.pair_R),)
    return source._replace(pair_R=checked("source", source.pair_R, shape, INT32, device))


class TMATile(NamedTuple):
    """Sizes of a tile (rows x columns x summed dim) and how a program computes it."""

    block_r: int
    block_c: int
    block_d: int
    warps: int
    stages: int
    per_sm: int = 1  # programs that a multiprocessor has room for

    def sizes(self) -> dict[str, int]:
        """Return the keyword arguments of a launch."""
        blocks = {"BLOCK_R": self.block_r, "BLOCK_C": self.block_c, "BLOCK_D": self.block_d}
        # beside a second program, the buffers of a flattened loop would have no room
        blocks["FLATTEN"] = self.per_sm == 1
        if self.per_sm > 1:
            blocks["maxnreg"] = 65536 // (32 * self.warps * self.per_sm)
        return {**blocks, "num_warps": self.warps, "num_stages": self.stages}


TILES = (
    TMATile(128, 256, 64, 8, 3),
    TMATile(128, 256, 64, 8, 4),
    TMATile(128, 128, 64, 8, 3, per_sm=2),
)
# The gathered gradient fills 3, 4 and 3 buffers: a load waits for that of its address.
TILES_OF_GATHERED = tuple(tile._replace(stages=2 * tile.stages - 1) for tile in TILES)
# The weights' reading dominates if an expert has few rows; a tile of 64 rows multiplies in vain.
TILES_OF_FEW_ROWS = (TMATile(16, 128, 128, 4, 4), TMATile(64, 128, 64, 4, 4))
_INTERPRETED = TMATile(16, 16, 16, 4, 1)


def tma_tiles(few_rows: bool = False, gathers_sum: bool = False) -> tuple[TMATile, ...]:
    """Return the tiles to choose from; the interpreter takes exactly one."""
    if INTERPRET:
        return (_INTERPRETED,)
    return TILES_OF_FEW_ROWS if few_rows else TILES_OF_GATHERED if gathers_sum else TILES


@triton.jit
def _place(tile, down, ACROSS: tl.constexpr, GROUP: tl.constexpr):
    """Return the row and column of a tile: GROUP rows are computed column by column.

    Example: 3 rows, ACROSS = 2, GROUP = 2: tiles 0 to 5 are (0, 0), (1, 0), (0, 1), (1, 1), (2, 0),
    (2, 1).
    """
    group = tile // (GROUP * ACROSS)
    rest = tile - group * (GROUP * ACROSS)
    size = tl.minimum(down - group * GROUP, GROUP)
    return group * GROUP + rest % size, rest // size


@triton.jit
def _dot_tma(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # the interpreter's product of bf16 is wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit(do_not_specialize=["num_rows", "e"])
def _rows_product_tma_kernel(
    out_ptr,  # (R, B) - output
    rows_ref,  # (R, A) by descriptor, or with a source tokens (T, A) by pointer
    source_ptr,  # (R,) int32 pair in each row, -1 = unused; None: rows_ref holds the rows
    weight_desc,  # (e, B, A) if TRANSPOSED, else (e, A, B)
    offsets_ptr,  # (e,) int32 end row of each expert
    num_rows,
    TOP_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    e,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (programs,): program p computes the tiles p, p + programs, and so on.

    Rows of nobody stay unwritten.

    Example: rows [[1], [2], [3]], weight [[[10]], [[100]]], offsets [1, 2]
    -> out [[10], [200], unwritten].
    """
    index, start, end, tiles = ragged_tiles(offsets_ptr, num_rows, e, BLOCK_R, BLOCK_EXPERTS)
    tiles = tl.where(index < e, tiles, 0)
    down = tl.sum(tiles, axis=0)
    across: tl.constexpr = (B + BLOCK_C - 1) // BLOCK_C
    first_tile, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for tile in tl.range(first_tile, down * across, step, flatten=FLATTEN):
        row, column = _place(tile, down, across, GROUP)
        passed = tl.cumsum(tiles, axis=0) <= row
        expert = tl.sum(passed.to(tl.int32), axis=0)
        here = index == expert
        tile_of_expert = row - tl.sum(tl.where(passed, tiles, 0), axis=0)
        first = tl.sum(tl.where(here, start, 0), axis=0) + tile_of_expert * BLOCK_R
        last = tl.sum(tl.where(here, end, 0), axis=0)
        first_r, first_b = first.to(tl.int32), (column * BLOCK_C).to(tl.int32)
        offs_r = first + tl.arange(0, BLOCK_R)
        token, has_token = token_of_row(source_ptr, offs_r, offs_r < last, TOP_K)
        acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for first_a in range(0, A, BLOCK_D):
            if source_ptr is None:  # rows of the next expert may come along: they are not stored
                rows = rows_ref.load([first_r, first_a])
            else:
                offs_a = first_a + tl.arange(0, BLOCK_D)
                mask = has_token[:, None] & (offs_a < A)[None, :]
                place = token[:, None] * A + offs_a[None, :]
                rows = tl.load(rows_ref + place, mask=mask, other=0.0)
            if TRANSPOSED:
                weight = weight_desc.load([expert, first_b, first_a])
                weight = weight.reshape(BLOCK_C, BLOCK_D).T
            else:
                weight = weight_desc.load([expert, first_a, first_b])
                weight = weight.reshape(BLOCK_D, BLOCK_C)
            acc = _dot_tma(rows, weight, acc, UPCAST)
        offs_b = column * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = (offs_r < last)[:, None] & (offs_b < B)[None, :]
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs_r[:, None] * B + offs_b[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["e"])
def _weight_gradient_tma_kernel(
    out_ptr,  # (e, A, B) - output; zero for an expert without rows
    d_desc,  # (R, A)
    rows_ref,  # (R, B) by descriptor, or with a source tokens (T, B) by pointer
    source_ptr,  # (R,) int32 pair in each row, -1 = unused; None: rows_ref holds the rows
    offsets_ptr,  # (e,) int32 end row of each expert
    TOP_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # the output is (e, B, A)
    e,
    A: tl.constexpr,
    B: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (programs,): see the product of rows. Sums over an expert's rows, BLOCK_D at a time.

    Example: d [[1], [2], [3]], rows [[10], [100], [1000]], offsets [1, 3]
    -> out [[[10]], [[3200]]].
    """
    down: tl.constexpr = (A + BLOCK_R - 1) // BLOCK_R
    across: tl.constexpr = (B + BLOCK_C - 1) // BLOCK_C
    first_tile, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for tile in tl.range(first_tile, e * down * across, step, flatten=FLATTEN):
        expert = tile // (down * across)
        row, column = _place(tile - expert * (down * across), down, across, GROUP)
        first_a, first_b = (row * BLOCK_R).to(tl.int32), (column * BLOCK_C).to(tl.int32)
        end = tl.load(offsets_ptr + expert)
        begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        size = end - begin
        acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for first in range(0, tl.maximum(size, 1), BLOCK_D):
            d = load_ragged(d_desc, begin, size, [first, first_a])
            if source_ptr is None:
                rows = load_ragged(rows_ref, begin, size, [first, first_b])
            else:
                offs_r = begin + first + tl.arange(0, BLOCK_D)
                token, has_token = token_of_row(source_ptr, offs_r, offs_r < end, TOP_K)
                offs_b = first_b + tl.arange(0, BLOCK_C)
                mask = has_token[:, None] & (offs_b < B)[None, :]
                place = token[:, None] * B + offs_b[None, :]
                rows = tl.load(rows_ref + place, mask=mask, other=0.0)
            acc = _dot_tma(d.T, rows, acc, UPCAST)
        offs_a = row * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_b = column * BLOCK_C + tl.arange(0, BLOCK_C)
        offs = offs_a[:, None] * B + offs_b[None, :]
        if TRANSPOSED:
            offs = offs_b[None, :] * A + offs_a[:, None]
        mask = (offs_a < A)[:, None] & (offs_b < B)[None, :]
        tl.store(out_ptr + expert * A * B + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def describable(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors, and torch's grouped product, can read all tensors.

    They begin at a multiple of 16 bytes, as do their rows; one dimension has stride 1.
    """
    for tensor in tensors:
        strides = sorted(tensor.stride())
        aligned = all(stride * tensor.element_size() % 16 == 0 for stride in strides[1:])
        if strides[0] != 1 or not aligned or tensor.data_ptr() % 16 != 0:
            return False
    return True


def has_tma(device: torch.device) -> bool:
    """Return whether the GPU has TMA, and shared memory enough for the tiles here."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _programs(device: torch.device, tile: TMATile) -> int:
    if INTERPRET:
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * tile.per_sm


def _options(
    tile: TMATile, dtype: torch.dtype, source: Source | None, **sizes: int
) -> dict[str, object]:
    upcast, top_k = INTERPRET and dtype == torch.bfloat16, source.top_k if source else 1
    return {"UPCAST": upcast, "GROUP": _GROUP, "TOP_K": top_k, **sizes, **tile.sizes()}


def rows_product_tma(
    rows_RA: Tensor, weight_eAB: Tensor, offsets: Tensor, source: Source | None, tile: TMATile
) -> Tensor:
    """Compute ``_grouped.rows_product`` for :func:`describable` halves, one row or more."""
    e, A, B = weight_eAB.shape
    R = len(rows_RA) if source is None else len(source.pair_R)
    out_RB = rows_RA.new_empty((R, B))
    transposed = weight_eAB.stride(2) != 1
    stored = weight_eAB.transpose(1, 2) if transposed else weight_eAB
    block = (tile.block_c, tile.block_d) if transposed else (tile.block_d, tile.block_c)
    with device_guard(rows_RA):
        if source is None:
            given = TensorDescriptor.from_tensor(rows_RA, [tile.block_r, tile.block_d]), None
        else:
            given = rows_RA, source.pair_R
        weight_desc = TensorDescriptor.from_tensor(stored, [1, *block])
        options = _options(tile, rows_RA.dtype, source, e=e, A=A, B=B, TRANSPOSED=transposed)
        options["BLOCK_EXPERTS"], programs = next_power_of_2(e + 1), _programs(rows_RA.device, tile)
        _rows_product_tma_kernel[(programs,)](out_RB, *given, weight_desc, offsets, R, **options)
    return out_RB


def weight_gradient_tma(
    d_RA: Tensor,
    rows_RB: Tensor,
    offsets: Tensor,
    source: Source | None,
    tile: TMATile,
    transposed: bool = False,
) -> Tensor:
    """Compute ``_grouped.weight_gradient`` for :func:`describable` halves, one row or more."""
    A, B, e = d_RA.shape[1], rows_RB.shape[1], offsets.shape[0]
    out = d_RA.new_empty((e, B, A) if transposed else (e, A, B))
    with device_guard(d_RA):
        if source is None:
            given = create_ragged_descriptor(rows_RB, [tile.block_d, tile.block_c]), None
        else:
            given = rows_RB, source.pair_R
        d_desc = create_ragged_descriptor(d_RA, [tile.block_d, tile.block_r])
        options = _options(tile, d_RA.dtype, source, e=e, A=A, B=B, TRANSPOSED=transposed)
        programs = _programs(d_RA.device, tile)
        _weight_gradient_tma_kernel[(programs,)](out, d_desc, *given, offsets, **options)
    return out
