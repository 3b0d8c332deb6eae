"""Tile sizes of all kernels, and the choice of the fastest tile or implementation.

The choice is kept by model dimensions and by the dtype of the rows, never by token counts, which
change from step to step. Only work of TUNE_ROWS rows and more is tuned; smaller work takes the
first tile that fits. Triton's cache on disk (``TRITON_CACHE_DIR``) keeps the choice, unless
``TRITON_CACHE_AUTOTUNING=0`` is set.
The order of sums is that of the tile, so equal tiles give equal bits; tuning again, with an empty
cache, may choose others. ``FAIRSEQ_TUTEL_AUTOTUNE=0`` tunes nothing.
The interpreter takes exactly one, with small tiles.
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import triton

from ._runtime import INTERPRET
from ._sizes import cdiv, next_power_of_2

T = TypeVar("T")
Tiles = tuple[dict[str, int], ...]  # blocks and number of warps

# Pairs per block of the slot kernels: a block compares all its pairs with each other.
SLOT_BLOCK = 16 if INTERPRET else 128
# Tile of the column scans, rows (blocks of tokens) x experts: a program goes through all rows.
SCAN_BLOCK_ROWS = 8 if INTERPRET else 256
SCAN_BLOCK_COLS = 8
# Tile of the sums for a bias: tiles of rows x columns.
SUM_BLOCK_ROWS = 8 if INTERPRET else 64
SUM_BLOCK_COLS = 8 if INTERPRET else 32
# Elements of a gating tile (tokens x experts padded to a power of two) and number of programs.
GATING_TILE = 64 if INTERPRET else 2048
GATING_PROGRAMS = 3 if INTERPRET else 512
# Rows that a program of dispatch looks through for unused ones; every BLOCK_T divides it.
ROWS_PER_PROGRAM = 8 if INTERPRET else 32
# Entries per program of the one-dimensional kernels.
FLAT_BLOCK = 32 if INTERPRET else 1024
# Adam: elements per block, blocks per program of the step, and programs that look for the maximum.
ADAM_BLOCK = 64 if INTERPRET else 2048
ADAM_BLOCKS = 2 if INTERPRET else 4
ADAM_PROGRAMS = 8 if INTERPRET else 512
# Numbers that a program rounds to fp8 at once.
FP8_BLOCK = 32 if INTERPRET else 4096
# Rows per program of the formats of the wire.
WIRE_ROWS = 2 if INTERPRET else 8
# Rows or pairs of a launch from which on it is tuned: the first one may be that of a few tokens.
TUNE_ROWS = 4096
# Rows per expert up to which a product takes as long as the reading of its weights.
FEW_ROWS = 64
# Tiles of the grouped products that fp32 without TF32 tries: larger ones spill registers.
IEEE_TILES = 2
# Bias + activation: least and most rows of a tile, columns of the widest block, and programs that
# tiles of more than the least rows leave.
ACT_TILE_ROWS = (8, 32) if INTERPRET else (64, 256)
ACT_COLUMNS = 32 if INTERPRET else 1024
ACT_PROGRAMS = 4 if INTERPRET else 1024

# Milliseconds for which an implementation is warmed up and timed.
_WARMUP_MS, _TIMED_MS = 5, 20
_FILE = "fastest.json"
# Index of the fastest implementation by its key.
_fastest: dict[Hashable, int] = {}


def _tiles(blocks: tuple[str, ...], interpreted: tuple[int, ...], *free: tuple[int, ...]) -> Tiles:
    """Return tiles with these blocks; ``free``: number of warps, then their sizes."""
    if INTERPRET:
        return (dict(zip(blocks, interpreted, strict=True)),)
    names = "num_warps", *blocks
    return tuple(dict(zip(names, sizes, strict=True)) for sizes in free)


# tokens x model dim, of dispatch and combine
MOVE_TILES = _tiles(
    ("BLOCK_T", "BLOCK_M"),
    (4, 32),
    *((4, 1, 2048), (4, 1, 4096), (8, 1, 4096), (4, 2, 1024), (8, 4, 1024)),
    *((4, 4, 512), (4, 8, 256), (4, 32, 64)),
)
# rows x hidden dim, of bias + activation; BLOCK_N divides a tile's rows
ACT_TILES = _tiles(
    ("BLOCK_N", "BLOCK_F"),
    (4, ACT_COLUMNS),
    *((4, 2, ACT_COLUMNS), (8, 4, ACT_COLUMNS), (4, 4, 512), (4, 8, 256), (4, 16, 128)),
)
# rows x columns x summed dim, of the products; the first one fits every GPU
PRODUCT_TILES = _tiles(
    ("BLOCK_R", "BLOCK_C", "BLOCK_D"),
    (16, 16, 16),
    *((4, 64, 64, 32), (8, 128, 128, 32), (4, 128, 64, 64), (4, 64, 128, 64), (8, 128, 256, 32)),
)


def act_tile_rows(num_rows: int, F: int) -> int:
    """Return the rows of a tile that writes one sum for the bias: as many as leave enough programs.

    Fewer sums are fewer bytes.
    """
    tile, most = ACT_TILE_ROWS
    while tile < most and num_rows * cdiv(F, ACT_COLUMNS) >= 2 * tile * ACT_PROGRAMS:
        tile *= 2
    return tile


def few_ieee_tiles(tiles: Tiles, given: dict) -> Tiles:
    """Drop the tiles that spill registers in fp32 without TF32, and take seconds to compile."""
    slow = given["rows_ptr"].dtype == torch.float32 and given["PRECISION"] == "ieee"
    return tiles[:IEEE_TILES] if slow else tiles


def narrow_tiles(tiles: Tiles, given: dict) -> Tiles:
    """Drop tiles wider than the row they work on (padded to a power of two)."""
    block, dim = ("BLOCK_M", "M") if "M" in given else ("BLOCK_F", "F")
    limit = next_power_of_2(given[dim])
    return tuple(tile for tile in tiles if tile[block] <= limit) or tiles[-1:]


@dataclass(frozen=True, eq=False)
class Tuned:
    """A kernel for :func:`launch`, with the tiles that it may have."""

    fn: triton.JITFunction
    tiles: Tiles
    fitting: Callable[[Tiles, dict], Tiles]  # from the tiles and the named arguments
    keys: tuple[str, ...]  # arguments on which the fastest tile depends


def launch(
    kernel: Tuned, grid: tuple | Callable, rows: int, dtype: torch.dtype, *args, **given
) -> None:
    """Launch a kernel with the fastest tile for the dtype of its rows, the kernel's keys, and
    the arguments that it has.

    Small work takes the first tile that fits, tuned or not, so that its results do not depend on
    what ran before.
    """
    tiles = kernel.fitting(kernel.tiles, given)
    tune = rows >= TUNE_ROWS and len(tiles) > 1
    # a kernel does other work without some of its arguments
    absent = [value is None for value in (*args, *given.values())] if tune else []
    key = kernel.fn.__name__, dtype, *[given[name] for name in kernel.keys], *absent

    def candidates() -> list[Callable]:
        return [partial(kernel.fn[grid], *args, **given, **tile) for tile in tiles]

    kernel.fn[grid](*args, **given, **tiles[_choice(key, candidates) if tune else 0])


def fastest(key: Hashable, tune: bool, candidates: Sequence[Callable[[], T]]) -> T:
    """Call the implementation that was the fastest when this key was first tuned.

    The key has the product, its sizes and dtype. Work that is too small (``tune``) takes the first
    implementation. One that needs more resources than the GPU has is left out.
    """
    tune = tune and len(candidates) > 1
    return candidates[_choice(key, lambda: candidates) if tune else 0]()


def _choice(key: Hashable, candidates: Callable[[], Sequence[Callable]]) -> int:
    """Return the index of the fastest candidate; 0 where nothing may be timed."""
    if key not in _fastest:
        pinned = os.environ.get("FAIRSEQ_TUTEL_AUTOTUNE", "1") == "0"
        if pinned or torch.cuda.is_current_stream_capturing():  # no timing in a graph
            return 0
        _fastest[key] = _kept_or_timed(key, candidates())
    return _fastest[key]


def _kept_or_timed(key: Hashable, candidates: Sequence[Callable[[], object]]) -> int:
    """Return the index of the fastest candidate from Triton's cache on disk, or time them."""
    what = f"{_installed()} {torch.cuda.get_device_name()} {len(candidates)} {key}"
    cache = triton.runtime.cache.get_cache_manager(hashlib.sha256(what.encode()).hexdigest())
    # Triton's own default is not to
    keeps = "TRITON_CACHE_AUTOTUNING" not in os.environ or triton.knobs.autotuning.cache
    path = cache.get_file(_FILE) if keeps else None
    if path is not None:
        return json.loads(Path(path).read_text())["fastest"]
    times = [_milliseconds(candidate) for candidate in candidates]
    found = times.index(min(times))
    if keeps and times[found] < math.inf:
        cache.put(json.dumps({"fastest": found, "key": str(key)}), _FILE, binary=False)
    return found


@functools.cache
def _installed() -> str:
    """Return a name of these kernels and of the libraries: others are timed again."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"{hashlib.sha256(sources).hexdigest()} {torch.__version__} {triton.__version__}"


def _milliseconds(candidate: Callable[[], object]) -> float:
    try:
        return triton.testing.do_bench(
            candidate, warmup=_WARMUP_MS, rep=_TIMED_MS, return_mode="median"
        )
    except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError):
        return math.inf
