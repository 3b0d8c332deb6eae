"""Bias + activation + dropout of the experts' hidden layer, one kernel each way.

The backward recomputes the activation from h (not for linear, whose derivative is 1), writes d_h
where that is wanted and, per tile of rows, the sums for d_bias; a second kernel adds the tiles of
each expert in a fixed order (no atomics).
Dropout draws from Philox (Salmon et al. 2011) by element index, so the mask is never stored.

Z are tiles of ACT_TILE_ROWS rows. The tail of ragged rows (``_tiles.py``) comes out zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._activations import FORMULA, activate, activate_bwd
from ._autotune import (
    ACT_TILE_ROWS,
    SCAN_BLOCK_COLS,
    SCAN_BLOCK_ROWS,
    act_configs,
    launch,
    prune_wide_tiles,
)
from ._runtime import FLOAT_DTYPES, check_tensor, device_guard
from ._tiles import ragged_tiles, tile_rows

_DYNAMIC = ["num_rows", "rows_per_expert"]
_KEY = ["F", "ACTIVATION", "RAGGED", "DROPOUT_P"]
_PRUNE = {"early_config_prune": prune_wide_tiles}


@triton.jit
def _keep_scale(
    seed,
    offs_n,
    start,
    F: tl.constexpr,
    DROPOUT_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """0 or 1 / (1 - p) for a tile of BLOCK_N rows and BLOCK_F columns from ``start``.

    Philox yields four numbers at a time; they serve four neighbouring columns.
    """
    group = start // 4 + tl.arange(0, BLOCK_F // 4)
    counter = offs_n[:, None] * ((F + 3) // 4) + group[None, :]
    u0, u1, u2, u3 = tl.rand4x(seed, counter)
    uniform = tl.interleave(tl.interleave(u0, u2), tl.interleave(u1, u3))
    return tl.where(uniform >= DROPOUT_P, 1.0 / (1.0 - DROPOUT_P), 0.0)


@triton.autotune(act_configs(), key=_KEY, prune_configs_by=_PRUNE)
@triton.jit(do_not_specialize=_DYNAMIC)
def _bias_act_fwd_kernel(
    y_ptr,  # (R, F) - output
    h_ptr,  # (R, F)
    bias_ptr,  # (e, F) float
    offsets_ptr,  # (e,) int32 end row of each expert; RAGGED
    seed_ptr,  # () int64; DROPOUT_P > 0
    num_rows,
    rows_per_expert,
    e: tl.constexpr,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RAGGED: tl.constexpr,
    DROPOUT_P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Grid (Z, cdiv(F, BLOCK_F)); a program loads its piece of the bias once.

    Example: h [[-3], [1]], e = 2, one row each, bias [[1], [2]], relu -> y [[0], [3]].
    """
    expert, first, last = tile_rows(
        tl.program_id(0).to(tl.int64),
        offsets_ptr,
        num_rows,
        rows_per_expert,
        e,
        RAGGED,
        TILE,
        BLOCK_EXPERTS,
    )
    start = tl.program_id(1).to(tl.int64) * BLOCK_F
    offs_f = start + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    bias = tl.load(bias_ptr + expert * F + offs_f, mask=mask_f & (expert < e), other=0.0)
    bias = bias.to(tl.float32)
    tl.static_assert(TILE % BLOCK_N == 0)
    for step in range(0, TILE, BLOCK_N):
        offs_n = first + step + tl.arange(0, BLOCK_N)
        mask = (offs_n < last)[:, None] & mask_f[None, :]
        offs = offs_n[:, None] * F + offs_f[None, :]
        # Rows of the tail are not read: they may hold anything. They come out zero, since
        # every activation maps 0 to 0.
        h = tl.load(h_ptr + offs, mask=mask & (expert < e), other=0.0).to(tl.float32)
        y = activate(h + bias[None, :], ACTIVATION)
        if DROPOUT_P > 0:
            y *= _keep_scale(tl.load(seed_ptr), offs_n, start, F, DROPOUT_P, BLOCK_N, BLOCK_F)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.autotune(act_configs(), key=[*_KEY, "HAS_DH"], prune_configs_by=_PRUNE)
@triton.jit(do_not_specialize=_DYNAMIC)
def _bias_act_bwd_dh_kernel(
    d_h_ptr,  # (R, F) - output; HAS_DH
    partial_ptr,  # (Z, F) fp32 - output: sums of d_h over the rows of each tile
    dy_ptr,  # (R, F)
    h_ptr,  # (R, F); not read for ACTIVATION linear
    bias_ptr,  # (e, F) float
    offsets_ptr,  # (e,) int32 end row of each expert; RAGGED
    seed_ptr,  # () int64; DROPOUT_P > 0
    num_rows,
    rows_per_expert,
    e: tl.constexpr,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RAGGED: tl.constexpr,
    DROPOUT_P: tl.constexpr,
    HAS_DH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Grid (Z, cdiv(F, BLOCK_F)).

    Example: h [[-3], [1]], e = 1, bias [[1]], relu, dy [[5], [7]] -> d_h [[0], [7]],
    partial [[7]] in one tile.
    """
    pid = tl.program_id(0).to(tl.int64)
    expert, first, last = tile_rows(
        pid, offsets_ptr, num_rows, rows_per_expert, e, RAGGED, TILE, BLOCK_EXPERTS
    )
    start = tl.program_id(1).to(tl.int64) * BLOCK_F
    offs_f = start + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    if ACTIVATION != "linear":
        bias = tl.load(bias_ptr + expert * F + offs_f, mask=mask_f & (expert < e), other=0.0)
        bias = bias.to(tl.float32)
    total = tl.zeros([BLOCK_F], tl.float32)
    tl.static_assert(TILE % BLOCK_N == 0)
    for step in range(0, TILE, BLOCK_N):
        offs_n = first + step + tl.arange(0, BLOCK_N)
        mask = (offs_n < last)[:, None] & mask_f[None, :]
        offs = offs_n[:, None] * F + offs_f[None, :]
        read = mask & (expert < e)
        d_h = tl.load(dy_ptr + offs, mask=read, other=0.0).to(tl.float32)
        if DROPOUT_P > 0:
            d_h *= _keep_scale(tl.load(seed_ptr), offs_n, start, F, DROPOUT_P, BLOCK_N, BLOCK_F)
        if ACTIVATION != "linear":
            h = tl.load(h_ptr + offs, mask=read, other=0.0).to(tl.float32)
            d_h *= activate_bwd(h + bias[None, :], ACTIVATION)
        total += tl.sum(d_h, axis=0)
        if HAS_DH:
            tl.store(d_h_ptr + offs, d_h.to(d_h_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + pid * F + offs_f, total, mask=mask_f)


@triton.jit(do_not_specialize=_DYNAMIC)
def _bias_act_bwd_db_kernel(
    d_bias_ptr,  # (e, F) - output
    partial_ptr,  # (Z, F) fp32 - sums over the rows of each tile
    offsets_ptr,  # (e,) int32 end row of each expert; RAGGED
    num_rows,
    rows_per_expert,
    e: tl.constexpr,
    F: tl.constexpr,
    RAGGED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Grid (e, cdiv(F, BLOCK_F)); adds up the tiles of each expert.

    Example: e = 2, rows_per_expert = 3, TILE = 2, partial [[1], [2], [3], [4]]
    -> d_bias [[3], [7]].
    """
    expert = tl.program_id(0).to(tl.int64)
    if RAGGED:
        index, _, _, tiles = ragged_tiles(offsets_ptr, num_rows, e, TILE, BLOCK_EXPERTS)
        first = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
        count = tl.sum(tl.where(index == expert, tiles, 0), axis=0)
    else:
        count = tl.cdiv(rows_per_expert, TILE).to(tl.int64)
        first = expert * count
    offs_f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    acc = tl.zeros([BLOCK_F], tl.float32)
    for start in range(0, count, BLOCK_Z):
        offs_z = start + tl.arange(0, BLOCK_Z).to(tl.int64)
        mask = (offs_z < count)[:, None] & mask_f[None, :]
        offs = (first + offs_z)[:, None] * F + offs_f[None, :]
        acc += tl.sum(tl.load(partial_ptr + offs, mask=mask, other=0.0), axis=0)
    tl.store(d_bias_ptr + expert * F + offs_f, acc.to(d_bias_ptr.dtype.element_ty), mask=mask_f)


def _check(
    h: Tensor,
    bias: Tensor,
    offsets: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    name: str = "h",
) -> None:
    num_experts = h.shape[0] if offsets is None else offsets.shape[0]
    check_tensor(name, h, tuple(h.shape), FLOAT_DTYPES, h.device)
    check_tensor("bias", bias, (num_experts, h.shape[-1]), FLOAT_DTYPES, h.device)
    if offsets is not None:
        check_tensor("offsets", offsets, (num_experts,), (torch.int32,), h.device)
    if dropout_p > 0:
        if seed is None:
            raise ValueError("dropout needs a seed")
        check_tensor("seed", seed, (), (torch.int64,), h.device)


def _sizes(h: Tensor, offsets: Tensor | None) -> tuple[int, dict]:
    """Number of tiles and the size arguments of the kernels."""
    num_experts = h.shape[0] if offsets is None else offsets.shape[0]
    num_rows = h.numel() // max(1, h.shape[-1])
    rows_per_expert = 0 if offsets is not None else h.shape[1]
    if offsets is None:
        num_tiles = num_experts * triton.cdiv(rows_per_expert, ACT_TILE_ROWS)
    else:  # an upper bound: every expert, and the tail, may leave its last tile part empty
        num_tiles = num_rows // ACT_TILE_ROWS + num_experts + 1
    return num_tiles, {
        "num_rows": num_rows,
        "rows_per_expert": rows_per_expert,
        "e": num_experts,
        "F": h.shape[-1],
        "RAGGED": offsets is not None,
        "TILE": ACT_TILE_ROWS,
        "BLOCK_EXPERTS": triton.next_power_of_2(num_experts + 1),
    }


def bias_act_fwd(
    h: Tensor,
    bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """:func:`fairseq_tutel.backends.torch.bias_act_fwd` in Triton; fp32, fp16 or bf16.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check(h, bias, offsets, dropout_p, seed)
    y = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    if h.numel() == 0:
        return y
    num_tiles, sizes = _sizes(h, offsets)
    with device_guard(h):
        launch(
            _bias_act_fwd_kernel,
            lambda meta: (num_tiles, triton.cdiv(sizes["F"], meta["BLOCK_F"])),
            sizes["num_rows"],
            y,
            h.contiguous(),
            bias.contiguous(),
            None if offsets is None else offsets.contiguous(),
            seed,
            **sizes,
            ACTIVATION=FORMULA[activation],
            DROPOUT_P=dropout_p,
        )
    return y


def bias_act_bwd(
    dy: Tensor,
    h: Tensor | None,
    bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    needs_h: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.bias_act_bwd` in Triton; fp32, fp16 or bf16.

    Deterministic for one choice of tiles; d_bias is summed in their order (see ``_autotune``).

    Raises:
        ValueError: wrong shape, dtype or device; no h where the activation needs it.
    """
    _check(dy, bias, offsets, dropout_p, seed, name="dy")
    formula = FORMULA[activation]
    if formula != "linear":
        if h is None:
            raise ValueError(f"the gradient of {activation} needs h")
        check_tensor("h", h, tuple(dy.shape), FLOAT_DTYPES, dy.device)
    d_h = torch.empty(dy.shape if needs_h else 0, dtype=dy.dtype, device=dy.device)
    if dy.numel() == 0:
        return d_h, torch.zeros_like(bias, memory_format=torch.contiguous_format)
    d_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    num_tiles, sizes = _sizes(dy, offsets)
    partial_ZF = torch.empty((num_tiles, sizes["F"]), dtype=torch.float32, device=dy.device)
    with device_guard(dy):
        launch(
            _bias_act_bwd_dh_kernel,
            lambda meta: (num_tiles, triton.cdiv(sizes["F"], meta["BLOCK_F"])),
            sizes["num_rows"],
            d_h if needs_h else None,
            partial_ZF,
            dy.contiguous(),
            None if formula == "linear" else h.contiguous(),
            bias.contiguous(),
            None if offsets is None else offsets.contiguous(),
            seed,
            **sizes,
            ACTIVATION=formula,
            DROPOUT_P=dropout_p,
            HAS_DH=needs_h,
        )
        _bias_act_bwd_db_kernel[(sizes["e"], triton.cdiv(sizes["F"], SCAN_BLOCK_COLS))](
            d_bias,
            partial_ZF,
            None if offsets is None else offsets.contiguous(),
            **sizes,
            BLOCK_Z=SCAN_BLOCK_ROWS,
            BLOCK_F=SCAN_BLOCK_COLS,
        )
    return d_h, d_bias
