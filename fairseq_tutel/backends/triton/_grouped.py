"""Grouped products: each expert multiplies its own rows of a ragged buffer.

Hopper and Blackwell have three implementations. torch's ``grouped_mm`` is one kernel for bf16 only.
For other dtypes, and on other GPUs, it copies the offsets to the host and loops over the experts
(torch 2.11). ``_grouped_tma.py`` computes fp16, and competes with ``grouped_mm`` for bf16 if
experts have few rows. Everything else takes the kernels here: a program computes one tile and finds
the tile's expert in the offsets, which stay on the GPU. A and B are the weight's dimensions.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import (
    FEW_ROWS,
    FLAT_BLOCK,
    PRODUCT_TILES,
    TUNE_ROWS,
    Tuned,
    fastest,
    few_ieee_tiles,
    launch,
)
from ._grouped_tma import (
    Source,
    checked_source,
    describable,
    has_tma,
    rows_product_tma,
    tma_tiles,
    weight_gradient_tma,
)
from ._runtime import FLOAT_DTYPES, INT32, INTERPRET, check_tensor, checked, device_guard
from ._sizes import cdiv, next_power_of_2
from ._tiles import tile_rows, token_of_row

_HAS_GROUPED_MM = hasattr(torch.nn.functional, "grouped_mm")  # since torch 2.10
_DYNAMIC = ["num_rows", "e"]
_tuned = partial(Tuned, tiles=PRODUCT_TILES, fitting=few_ieee_tiles)
# Programs per expert that look whether its gradient has to be cleared.
_CLEARING_PROGRAMS = 128


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:  # the interpreter's product of bf16 is wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@partial(_tuned, keys=("A", "B", "stride_a", "PRECISION"))
@triton.jit(do_not_specialize=_DYNAMIC)
def _rows_product_kernel(
    out_ptr,  # (R, B) - output; the rows of nobody come out zero
    rows_ptr,  # (R, A), or tokens (T, A)
    source_ptr,  # (R,) int32 pair in each row, -1 = unused; None: rows_ptr holds the rows
    matrix_ptr,  # (e, A, B) - the experts' weights
    offsets_ptr,  # (e,) int32 end row of each expert
    num_rows,
    TOP_K: tl.constexpr,
    stride_e: tl.constexpr,
    stride_a: tl.constexpr,
    stride_b: tl.constexpr,
    e,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tiles of BLOCK_R rows * cdiv(B, BLOCK_C),): columns of one tile of rows are neighbours.

    Only the first dimension of a grid may have more than 65,535 programs.

    Example: rows [[1], [2], [3]], weight [[[10]], [[100]]], offsets [1, 2]
    -> out [[10], [200], [0]].
    """
    pid = tl.program_id(0).to(tl.int64)
    columns: tl.constexpr = (B + BLOCK_C - 1) // BLOCK_C
    expert, first, last = tile_rows(
        pid // columns, offsets_ptr, num_rows, 0, e, BLOCK_R, BLOCK_EXPERTS
    )
    offs_r = first + tl.arange(0, BLOCK_R)
    offs_b = (pid % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_r, mask_b = offs_r < last, offs_b < B
    token, has_token = token_of_row(source_ptr, offs_r, mask_r, TOP_K)
    acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    if expert < e:
        for start in range(0, A, BLOCK_D):
            offs_a = start + tl.arange(0, BLOCK_D).to(tl.int64)
            mask_a = offs_a < A
            rows = tl.load(
                rows_ptr + token[:, None] * A + offs_a[None, :],
                mask=has_token[:, None] & mask_a[None, :],
                other=0.0,
            )
            weight = tl.load(
                matrix_ptr
                + expert * stride_e
                + offs_a[:, None] * stride_a
                + offs_b[None, :] * stride_b,
                mask=mask_a[:, None] & mask_b[None, :],
                other=0.0,
            )
            acc = _dot(rows, weight, acc, PRECISION, UPCAST)
    out = acc.to(out_ptr.dtype.element_ty)
    mask = mask_r[:, None] & mask_b[None, :]
    tl.store(out_ptr + offs_r[:, None] * B + offs_b[None, :], out, mask=mask)


@partial(_tuned, keys=("A", "B", "PRECISION"))
@triton.jit
def _weight_gradient_kernel(
    out_ptr,  # (e, A, B) - output; zero for an expert without rows
    d_ptr,  # (R, A)
    rows_ptr,  # (R, B), or tokens (T, B)
    source_ptr,  # (R,) int32 pair in each row, -1 = unused; None: rows_ptr holds the rows
    offsets_ptr,  # (e,) int32 end row of each expert
    TOP_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # the output is (e, B, A)
    A: tl.constexpr,
    B: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (cdiv(B, BLOCK_C), cdiv(A, BLOCK_R), e); sums over an expert's rows, BLOCK_D at a time.

    Example: d [[1], [2], [3]], rows [[10], [100], [1000]], offsets [1, 3]
    -> out [[[10]], [[3200]]].
    """
    expert = tl.program_id(2).to(tl.int64)
    offs_a = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_a, mask_b = offs_a < A, offs_b < B
    end = tl.load(offsets_ptr + expert).to(tl.int64)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(begin, end, BLOCK_D):
        offs_r = start + tl.arange(0, BLOCK_D)
        mask_r = offs_r < end
        d = tl.load(
            d_ptr + offs_r[None, :] * A + offs_a[:, None],
            mask=mask_a[:, None] & mask_r[None, :],
            other=0.0,
        )
        token, has_token = token_of_row(source_ptr, offs_r, mask_r, TOP_K)
        rows = tl.load(
            rows_ptr + token[:, None] * B + offs_b[None, :],
            mask=has_token[:, None] & mask_b[None, :],
            other=0.0,
        )
        acc = _dot(d, rows, acc, PRECISION, UPCAST)
    out = acc.to(out_ptr.dtype.element_ty)
    offs = offs_a[:, None] * B + offs_b[None, :]
    if TRANSPOSED:
        offs = offs_b[None, :] * A + offs_a[:, None]
    tl.store(out_ptr + expert * A * B + offs, out, mask=mask_a[:, None] & mask_b[None, :])


@triton.jit
def _clear_unused_kernel(
    gradient_ptr,  # (e, A, B) - in and output; zero for an expert without rows
    offsets_ptr,  # (e,) int32 end row of each expert
    AB: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (PROGRAMS, e); programs of an expert that has rows write nothing.

    Example: gradient [[[7]], [[9]]], offsets [0, 3] -> gradient [[[0]], [[9]]].
    """
    expert = tl.program_id(1).to(tl.int64)
    end = tl.load(offsets_ptr + expert)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    if begin == end:
        for start in range(tl.program_id(0) * BLOCK, AB, PROGRAMS * BLOCK):
            offs = start + tl.arange(0, BLOCK).to(tl.int64)
            zeros = tl.zeros([BLOCK], gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + expert * AB + offs, zeros, mask=offs < AB)


def _reads_by_tma(*tensors: Tensor) -> bool:
    """Return whether kernels with TMA loads, also that of ``grouped_mm``, can read the tensors."""
    return has_tma(tensors[0].device) and describable(*tensors)


def _candidates(
    few_rows: bool,
    source: Source | None,
    tensors: tuple[Tensor, Tensor],
    tma: list[Callable[[], Tensor]],
    torchs: Callable[[], Tensor],
) -> list[Callable[[], Tensor]]:
    """Return the implementations that compete. torch's cannot gather and writes the rows first.

    It is one kernel for bf16 alone, where mine compete on few rows, or on rows to gather.
    """
    half, brain = (tensors[0].dtype == each for each in (torch.float16, torch.bfloat16))
    if not ((half or brain) and _reads_by_tma(*tensors)):
        return []
    mine = tma if half or few_rows or source is not None else []
    theirs = [torchs] if brain and _HAS_GROUPED_MM else []
    return [*theirs, *mine] if source is None else [*mine, *theirs]


def _grouped_mm_skips_unused(rows: Tensor) -> bool:
    """Return whether ``grouped_mm`` leaves the gradient of an expert without rows unwritten.

    CUTLASS's kernel for Blackwell does (PyTorch issue 172439).
    """
    return rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] == 10


def _torch_uses_tf32() -> bool:
    """Return whether torch's products of fp32 use TF32 on a GPU."""
    # since torch 2.9, where it has the last word and the older question may raise
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision == "tf32"


def _precision(dtype: torch.dtype) -> dict:
    """Allow TF32 if torch's own products may use it."""
    tf32 = dtype == torch.float32 and not torch.version.hip and _torch_uses_tf32()
    return {
        "PRECISION": "tf32" if tf32 else "ieee",
        "UPCAST": INTERPRET and dtype == torch.bfloat16,
    }


def rows_product(
    rows_RA: Tensor, weight_eAB: Tensor, offsets: Tensor | None, source: Source | None = None
) -> Tensor:
    """Return ``rows[begin_x : end_x] @ weight[x]`` for every expert x, (R, B).

    Rows past the last end are unspecified.

    Args:
        rows_RA: (R, A), fp32, fp16 or bf16; with ``source`` the tokens, (T, A).
        weight_eAB: (e, A, B) of the same dtype, with any strides.
        offsets: (e,) int32, ascending: the end row of each expert. None: rows are (e, N, A).
        source: where rows are among the tokens (default None: ``rows_RA`` holds the rows).
    """
    if offsets is None:
        return torch.bmm(rows_RA, weight_eAB)
    (num_rows, A), (e, _, B), device = rows_RA.shape, weight_eAB.shape, rows_RA.device
    rows_RA = checked("rows", rows_RA, (num_rows, A), FLOAT_DTYPES, device)
    check_tensor("weight", weight_eAB, (e, A, B), (rows_RA.dtype,), device)
    offsets = checked("offsets", offsets, (e,), INT32, device)
    source = checked_source(source, device)
    R = num_rows if source is None else len(source.pair_R)
    if R * B == 0:
        return rows_RA.new_empty((R, B))
    few_rows = R / max(e, 1) <= FEW_ROWS
    given = rows_RA, weight_eAB, offsets, source
    tma = [partial(rows_product_tma, *given, tile) for tile in tma_tiles(few_rows)]
    candidates = _candidates(few_rows, source, given[:2], tma, partial(_grouped_mm, *given))
    if candidates:
        key = "rows", few_rows, source is None, rows_RA.dtype, A, B, weight_eAB.stride()
        with device_guard(rows_RA):
            return fastest(key, few_rows or R >= TUNE_ROWS, candidates)
    return _rows_product(rows_RA, weight_eAB, offsets, source)


def _source_arguments(source: Source | None) -> dict[str, object]:
    pair_R, top_k = (None, 1) if source is None else source
    return {"source_ptr": pair_R, "TOP_K": top_k}


def _rows_product(
    rows_RA: Tensor, weight_eAB: Tensor, offsets: Tensor, source: Source | None
) -> Tensor:
    """Compute :func:`rows_product` with the kernel for every GPU and dtype."""
    (e, A, B), R = weight_eAB.shape, len(rows_RA) if source is None else len(source.pair_R)
    out_RB = rows_RA.new_empty((R, B))

    def grid(meta: dict) -> tuple[int]:
        # an upper bound: every expert, and the tail, may leave its last tile part empty
        return ((R // meta["BLOCK_R"] + e + 1) * cdiv(B, meta["BLOCK_C"]),)

    tensors = {"out_ptr": out_RB, "rows_ptr": rows_RA, "matrix_ptr": weight_eAB}
    sizes = {"num_rows": R, "e": e, "A": A, "B": B, "BLOCK_EXPERTS": next_power_of_2(e + 1)}
    sizes |= zip(("stride_e", "stride_a", "stride_b"), weight_eAB.stride(), strict=True)
    given = {**tensors, "offsets_ptr": offsets, **sizes, **_precision(rows_RA.dtype)}
    with device_guard(rows_RA):
        launch(_rows_product_kernel, grid, R, rows_RA.dtype, **given, **_source_arguments(source))
    return out_RB


def weight_gradient(
    d_RA: Tensor,
    rows_RB: Tensor,
    offsets: Tensor | None,
    source: Source | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return ``d[begin_x : end_x].T @ rows[begin_x : end_x]`` for every expert x, (e, A, B).

    An expert without rows has a gradient of zeros. ``offsets`` and ``source``, of ``rows_RB``, are
    those of :func:`rows_product`. ``transposed`` returns the transposes, (e, B, A).
    """
    if offsets is None:
        return torch.bmm(d_RA.transpose(1, 2), rows_RB)
    (R, A), B, e, device = d_RA.shape, rows_RB.shape[1], offsets.shape[0], d_RA.device
    d_RA = checked("d", d_RA, (R, A), FLOAT_DTYPES, device)
    num_rows = R if source is None else len(rows_RB)
    rows_RB = checked("rows", rows_RB, (num_rows, B), (d_RA.dtype,), device)
    offsets = checked("offsets", offsets, (e,), INT32, device)
    source = checked_source(source, device)
    shape = (e, B, A) if transposed else (e, A, B)
    if R == 0:
        return d_RA.new_zeros(shape)
    few_rows = R / max(e, 1) <= FEW_ROWS
    given = d_RA, rows_RB, offsets, source
    # few rows are a short sum and not a small tile
    tiles = tma_tiles(gathers_sum=source is not None)
    tma = [partial(weight_gradient_tma, *given, tile, transposed) for tile in tiles]
    torchs = partial(_grouped_mm_gradient, *given, transposed)
    candidates = _candidates(few_rows, source, given[:2], tma, torchs)
    if candidates:
        key = "gradient", few_rows, source is None, transposed, d_RA.dtype, A, B
        with device_guard(d_RA):
            return fastest(key, few_rows or R >= TUNE_ROWS, candidates)
    out = d_RA.new_empty(shape)

    def grid(meta: dict) -> tuple[int, int, int]:
        return cdiv(B, meta["BLOCK_C"]), cdiv(A, meta["BLOCK_R"]), e

    if out.numel() > 0:
        tensors = {"out_ptr": out, "d_ptr": d_RA, "rows_ptr": rows_RB, "offsets_ptr": offsets}
        sizes = {"TRANSPOSED": transposed, "A": A, "B": B, **_precision(d_RA.dtype)}
        with device_guard(d_RA):
            given = {**tensors, **sizes, **_source_arguments(source)}
            launch(_weight_gradient_kernel, grid, R, d_RA.dtype, **given)
    return out


def _written(rows: Tensor, source: Source | None) -> Tensor:
    if source is None:
        return rows
    return rows.index_select(0, source.pair_R.clamp(min=0) // source.top_k)


def _grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, source: Source | None) -> Tensor:
    """Compute :func:`rows_product` with torch's kernel, which needs rows that are written."""
    return torch.nn.functional.grouped_mm(_written(rows, source), weight, offs=offsets)


def _grouped_mm_gradient(
    d_RA: Tensor, rows_RB: Tensor, offsets: Tensor, source: Source | None, transposed: bool = False
) -> Tensor:
    """Compute :func:`weight_gradient` with torch's kernel."""
    first, second = d_RA, _written(rows_RB, source)
    if transposed:
        first, second = second, first
    out_eAB = torch.nn.functional.grouped_mm(first.t(), second, offs=offsets)
    if _grouped_mm_skips_unused(d_RA):
        _clear_unused(out_eAB, offsets)
    return out_eAB


def _clear_unused(out_eAB: Tensor, offsets: Tensor) -> None:
    """Write zeros to the gradients of experts without rows."""
    (e, A, B), programs = out_eAB.shape, _CLEARING_PROGRAMS
    with device_guard(out_eAB):
        _clear_unused_kernel[(programs, e)](
            out_eAB, offsets, AB=A * B, PROGRAMS=programs, BLOCK=FLAT_BLOCK
        )
