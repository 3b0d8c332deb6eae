"""Tiles of rows that never span two experts, as device functions.

"Ragged" rows have an end row per expert (offsets) and a tail that no expert owns; the tail counts
as one more expert.
"""

import triton
import triton.language as tl


@triton.jit
def ragged_tiles(offsets_ptr, num_rows, e, TILE: tl.constexpr, BLOCK_EXPERTS: tl.constexpr):
    """Return index, start row, end row and number of tiles of the experts; index e is the tail.

    Example: offsets [3, 3, 7], 9 rows, TILE = 2 -> starts [0, 3, 3, 7], ends [3, 3, 7, 9],
    tiles [2, 0, 2, 1].
    """
    index = tl.arange(0, BLOCK_EXPERTS)
    end = tl.load(offsets_ptr + index, mask=index < e, other=0).to(tl.int64)
    end = tl.where(index < e, end, num_rows)
    start = tl.load(offsets_ptr + index - 1, mask=(index > 0) & (index <= e), other=0)
    start = tl.where(index <= e, start.to(tl.int64), num_rows)
    return index, start, end, (end - start + TILE - 1) // TILE


@triton.jit
def token_of_row(source_ptr, offs_r, mask_r, TOP_K: tl.constexpr):
    """Return each row's token (int64) and whether it has one; without a source the row itself.

    Example: source [5, -1, 2], TOP_K = 2 -> tokens [2, any, 1], [True, False, True].
    """
    token, has_token = offs_r.to(tl.int64), mask_r
    if source_ptr is not None:
        pair = tl.load(source_ptr + offs_r, mask=mask_r, other=-1)
        token, has_token = (pair // TOP_K).to(tl.int64), pair >= 0
    return token, has_token


@triton.jit
def tile_rows(
    pid,
    offsets_ptr,
    num_rows,
    rows_per_expert,
    e,
    TILE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Return expert, first row and the expert's end row of tile ``pid``; no row past the last tile.

    Example: offsets [3, 3, 7], 9 rows, TILE = 2: tile 2 -> (2, 3, 7), tile 4 -> (3, 7, 9).
    """
    if offsets_ptr is not None:
        index, start, end, tiles = ragged_tiles(offsets_ptr, num_rows, e, TILE, BLOCK_EXPERTS)
        passed = tl.cumsum(tiles, axis=0) <= pid
        expert = tl.sum(passed.to(tl.int64), axis=0)
        tile = pid - tl.sum(tl.where(passed, tiles, 0), axis=0)
        here = index == expert
        first = tl.sum(tl.where(here, start, 0), axis=0) + tile * TILE
        last = tl.sum(tl.where(here, end, 0), axis=0)
    else:
        tiles_per_expert = tl.cdiv(rows_per_expert, TILE)
        expert = pid // tiles_per_expert
        first = expert * rows_per_expert + (pid - expert * tiles_per_expert) * TILE
        last = (expert + 1) * rows_per_expert
    return expert, first, last
