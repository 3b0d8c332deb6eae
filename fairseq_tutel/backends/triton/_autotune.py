"""Tile sizes of all kernels.

Autotuned kernels are keyed by model dimensions and by the dtype of their rows, never by token
counts, which change from step to step. Only work of TUNE_ROWS rows and more is tuned; smaller work
takes the first tile that fits. Triton's cache on disk (``TRITON_CACHE_DIR``) keeps the choice,
unless ``TRITON_CACHE_AUTOTUNING=0`` is set before the import.
The order of sums is that of the tile, so equal tiles give equal bits; tuning again, with an empty
cache, may choose others. ``FAIRSEQ_TUTEL_AUTOTUNE=0`` tunes nothing.
The interpreter takes exactly one, with small tiles.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import triton

from ._runtime import INTERPRET
from ._sizes import cdiv, next_power_of_2

T = TypeVar("T")

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
# Blocks and warps of an autotuned kernel's launches by the kernel, dtype and sizes.
_tiles: dict[Hashable, dict] = {}


def _pinned() -> bool:
    return os.environ.get("FAIRSEQ_TUTEL_AUTOTUNE", "1") == "0"


def _keeps_times() -> bool:
    """Return whether Triton's cache on disk keeps times; Triton's own default is not to."""
    return "TRITON_CACHE_AUTOTUNING" not in os.environ or triton.knobs.autotuning.cache


def _configs(
    blocks: tuple[str, ...], interpreted: tuple[int, ...], *free: tuple[int, ...]
) -> list[triton.Config]:
    """Return configurations with these blocks; ``free``: number of warps, then their sizes."""
    if INTERPRET:
        return [triton.Config(dict(zip(blocks, interpreted, strict=True)))]
    return [
        triton.Config(dict(zip(blocks, sizes, strict=True)), num_warps=warps)
        for warps, *sizes in free
    ]


def tuning(configs: list[triton.Config], prune: Callable) -> dict[str, object]:
    """Return the options of ``triton.autotune`` but its key."""
    prune_by = {"early_config_prune": prune}
    return {"configs": configs, "prune_configs_by": prune_by, "cache_results": _keeps_times()}


def move_configs() -> list[triton.Config]:
    """Return tiles (tokens x model dim) of dispatch and combine."""
    wide = ((4, 1, 2048), (4, 1, 4096), (8, 1, 4096), (4, 2, 1024), (8, 4, 1024))
    narrow = ((4, 4, 512), (4, 8, 256), (4, 32, 64))
    return _configs(("BLOCK_T", "BLOCK_M"), (4, 32), *wide, *narrow)


def act_configs() -> list[triton.Config]:
    """Return tiles (rows x hidden dim) of bias + activation; BLOCK_N divides a tile's rows."""
    wide = ((4, 2, ACT_COLUMNS), (8, 4, ACT_COLUMNS))
    narrow = ((4, 4, 512), (4, 8, 256), (4, 16, 128))
    return _configs(("BLOCK_N", "BLOCK_F"), (4, ACT_COLUMNS), *wide, *narrow)


def act_tile_rows(num_rows: int, F: int) -> int:
    """Return the rows of a tile that writes one sum for the bias: as many as leave enough programs.

    Fewer sums are fewer bytes.
    """
    tile, most = ACT_TILE_ROWS
    while tile < most and num_rows * cdiv(F, ACT_COLUMNS) >= 2 * tile * ACT_PROGRAMS:
        tile *= 2
    return tile


def product_configs() -> list[triton.Config]:
    """Return tiles (rows x columns x summed dim) of the products; the first fits every GPU."""
    small = ((4, 64, 64, 32), (8, 128, 128, 32), (4, 128, 64, 64), (4, 64, 128, 64))
    return _configs(("BLOCK_R", "BLOCK_C", "BLOCK_D"), (16, 16, 16), *small, (8, 128, 256, 32))


def prune_ieee_tiles(configs: list[triton.Config], named_args: dict, **kwargs) -> list:
    """Drop the tiles that spill registers in fp32 without TF32, and take seconds to compile."""
    args = {**named_args, **kwargs}
    if args["rows_ptr"].dtype != torch.float32 or args["PRECISION"] != "ieee":
        return configs
    return configs[:IEEE_TILES]


def prune_wide_tiles(configs: list[triton.Config], named_args: dict, **kwargs) -> list:
    """Drop tiles wider than the row they work on (padded to a power of two)."""
    args = {**named_args, **kwargs}
    for block, dim in (("BLOCK_M", "M"), ("BLOCK_F", "F")):
        if dim in args:
            limit = next_power_of_2(args[dim])
            return [c for c in configs if c.kwargs[block] <= limit] or configs[-1:]
    return configs


def launch(
    kernel: triton.KernelInterface,
    grid: tuple | Callable,
    rows: int,
    dtype: torch.dtype,
    *args,
    **kw,
) -> None:
    """Launch an autotuned kernel, tuning it for the dtype of its rows if they are many.

    Smaller work takes the first tile that fits, tuned or not, so that its results do not depend on
    what ran before. Later launches do not ask Triton's autotuner, which takes 10 us to answer.
    """
    tuned = rows >= TUNE_ROWS and len(kernel.configs) > 1
    key = (kernel, dtype, tuned, *[kw[name] for name in kernel.keys])
    tile = _tiles.get(key)
    if tile is None:
        tunes = tuned and not _pinned()
        later = tunes and torch.cuda.is_current_stream_capturing()  # no timing in a graph
        if tunes and not later:
            with contextlib.suppress(torch.OutOfMemoryError):  # the timing takes 256 MB
                kernel[grid](*args, **kw)
                _tiles[key] = kernel.best_config.all_kwargs()
                return
        tile = prune_wide_tiles(kernel.configs, kw)[0].all_kwargs()
        if not later:
            _tiles[key] = tile
    kernel.fn[grid](*args, **kw, **tile)


def fastest(key: Hashable, tune: bool, candidates: Sequence[Callable[[], T]]) -> T:
    """Call the implementation that was the fastest when this key was first tuned.

    The key has the product, its sizes and dtype. Work that is too small (``tune``) takes the first
    implementation. One that needs more resources than the GPU has is left out.
    """
    if not tune or len(candidates) == 1 or _pinned():
        return candidates[0]()
    if key not in _fastest:
        if torch.cuda.is_current_stream_capturing():  # nothing can be timed in a graph
            return candidates[0]()
        _fastest[key] = _kept_or_timed(key, candidates)
    return candidates[_fastest[key]]()


def _kept_or_timed(key: Hashable, candidates: Sequence[Callable[[], object]]) -> int:
    """Return the index of the fastest candidate from Triton's cache on disk, or time them."""
    what = f"{_installed()} {torch.cuda.get_device_name()} {len(candidates)} {key}"
    cache = triton.runtime.cache.get_cache_manager(hashlib.sha256(what.encode()).hexdigest())
    keeps = _keeps_times()
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
