"""Bias + activation + dropout of the experts' hidden layer, one kernel each way.

h is W numbers wide: the F that are activated, or of a gated network 2F, the gate's and then those
that its activation multiplies (up).

The backward recomputes the activation from h (not for linear, whose derivative is 1), writes d_h
where that is wanted and, per tile of rows, the sums for d_bias; a second kernel adds the tiles of
each expert in a fixed order (no atomics).
Dropout draws from Philox (Salmon et al. 2011) by element index, so the mask is never stored.

Z are tiles of rows. The tail of ragged rows (``_tiles.py``) is neither read nor
written.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import GATES
from ._activations import FORMULA, activate, activate_bwd
from ._autotune import (
    ACT_TILE_ROWS,
    ACT_TILES,
    SUM_BLOCK_COLS,
    SUM_BLOCK_ROWS,
    Tuned,
    act_tile_rows,
    launch,
    narrow_tiles,
)
from ._runtime import FLOAT_DTYPES, INT32, check_tensor, checked, device_guard
from ._sizes import cdiv, next_power_of_2
from ._tiles import ragged_tiles, tile_rows

_DYNAMIC = ["num_rows", "rows_per_expert", "e"]
_KEYS = "F", "TILE", "ACTIVATION", "GATED", "DROPOUT_P"
_tuned = partial(Tuned, tiles=ACT_TILES, fitting=narrow_tiles, keys=_KEYS)


@triton.jit
def _keep_scale(
    seed_ptr,
    offs_n,
    start,
    F: tl.constexpr,
    DROPOUT_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Return 0 or 1 / (1 - p) for a tile of BLOCK_N rows and BLOCK_F columns from ``start``.

    Philox yields four numbers at a time; they serve four neighbouring columns.
    """
    group = start // 4 + tl.arange(0, BLOCK_F // 4)
    counter = offs_n[:, None] * ((F + 3) // 4) + group[None, :]
    u0, u1, u2, u3 = tl.rand4x(tl.load(seed_ptr), counter)
    uniform = tl.interleave(tl.interleave(u0, u2), tl.interleave(u1, u3))
    return tl.where(uniform >= DROPOUT_P, 1.0 / (1.0 - DROPOUT_P), 0.0)


@triton.jit
def _load_bias(bias_ptr, offs, mask):
    """Load a piece of an expert's bias in fp32; zeros without biases."""
    bias = tl.zeros(offs.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _load_biased(h_ptr, offs, mask, bias_ptr, bias):
    """Load a tile of h + bias in fp32."""
    z = tl.load(h_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += bias[None, :]
    return z


@_tuned
@triton.jit(do_not_specialize=_DYNAMIC)
def _bias_act_fwd_kernel(
    y_ptr,  # (R, F) - output
    h_ptr,  # (R, W)
    bias_ptr,  # (e, W) float or None
    offsets_ptr,  # (e,) int32 end row of each expert; None: rows_per_expert each
    seed_ptr,  # () int64; DROPOUT_P > 0
    num_rows,
    rows_per_expert,
    e,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT_P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Grid (Z, cdiv(F, BLOCK_F)); a program loads its piece of the bias once.

    Example: h [[-3], [1]], e = 2, one row each, bias [[1], [2]], relu -> y [[0], [3]].
    Gated: h [[0, 5], [99, 5]], bias [[0, 1], [1, 1]], swiglu -> y [[0], [600]].
    """
    pid = tl.program_id(0).to(tl.int64)
    expert, first, last = tile_rows(
        pid, offsets_ptr, num_rows, rows_per_expert, e, TILE, BLOCK_EXPERTS
    )
    W: tl.constexpr = 2 * F if GATED else F
    start = tl.program_id(1).to(tl.int64) * BLOCK_F
    offs_f = start + tl.arange(0, BLOCK_F)
    mask_f = offs_f < tl.where(expert < e, F, 0)  # no expert owns the tail
    bias = _load_bias(bias_ptr, expert * W + offs_f, mask_f)
    if GATED:
        up_bias = _load_bias(bias_ptr, expert * W + F + offs_f, mask_f)
    tl.static_assert(TILE % BLOCK_N == 0)
    for step in range(0, TILE, BLOCK_N):
        offs_n = first + step + tl.arange(0, BLOCK_N)
        mask = (offs_n < last)[:, None] & mask_f[None, :]
        offs_h = offs_n[:, None] * W + offs_f[None, :]
        y = activate(_load_biased(h_ptr, offs_h, mask, bias_ptr, bias), ACTIVATION)
        if GATED:
            y *= _load_biased(h_ptr + F, offs_h, mask, bias_ptr, up_bias)
        if DROPOUT_P > 0:
            y *= _keep_scale(seed_ptr, offs_n, start, F, DROPOUT_P, BLOCK_N, BLOCK_F)
        offs_y = offs_n[:, None] * F + offs_f[None, :]
        tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


@_tuned
@triton.jit(do_not_specialize=_DYNAMIC)
def _bias_act_bwd_dh_kernel(
    d_h_ptr,  # (R, W) - output, or None
    partial_ptr,  # (Z, W) fp32 - output, or None: sums of d_h over the rows of each tile
    active_ptr,  # (R, F) - output, or None: weight * y; with weight_ptr and h_ptr
    dot_ptr,  # (R, BLOCKS) fp32 - output: parts of <dy, y>; with weight_ptr
    weight_ptr,  # (R,) fp32 factor of each row's dy, or None
    dy_ptr,  # (R, F)
    h_ptr,  # (R, W); None for ACTIVATION linear: y is then the bias, or does not matter
    bias_ptr,  # (e, W) float or None
    offsets_ptr,  # (e,) int32 end row of each expert; None: rows_per_expert each
    seed_ptr,  # () int64; DROPOUT_P > 0
    num_rows,
    rows_per_expert,
    e,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT_P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Grid (Z, cdiv(F, BLOCK_F)); BLOCKS: a power of two, at least the second dimension.

    Example: h [[-3], [1]], e = 1, bias [[1]], relu, dy [[5], [7]] -> d_h [[0], [7]],
    partial [[7]] in one tile. Gated: h [[0, 4], [100, 4]], bias [[0, 1]], swiglu, dy [[2], [2]]
    -> d_h [[5, 0], [10, 200]], partial [[15, 200]]. With weight [2, 3] besides:
    d_h [[10, 0], [30, 600]], partial [[40, 600]], active [[0], [1500]], dot [0, 1000].
    """
    pid = tl.program_id(0).to(tl.int64)
    expert, first, last = tile_rows(
        pid, offsets_ptr, num_rows, rows_per_expert, e, TILE, BLOCK_EXPERTS
    )
    W: tl.constexpr = 2 * F if GATED else F
    start = tl.program_id(1).to(tl.int64) * BLOCK_F
    offs_f = start + tl.arange(0, BLOCK_F)
    mask_f = offs_f < tl.where(expert < e, F, 0)  # no expert owns the tail
    bias = _load_bias(bias_ptr, expert * W + offs_f, mask_f)
    total = tl.zeros([BLOCK_F], tl.float32)
    if weight_ptr is not None:
        # programs of wide columns are fewer, and write zeros in place of the others
        block, offs_b = tl.program_id(1), tl.arange(0, BLOCKS)
        mine = offs_b % tl.num_programs(1) == block
    if GATED:
        up_bias = _load_bias(bias_ptr, expert * W + F + offs_f, mask_f)
        up_total = tl.zeros([BLOCK_F], tl.float32)
    tl.static_assert(TILE % BLOCK_N == 0)
    for step in range(0, TILE, BLOCK_N):
        offs_n = first + step + tl.arange(0, BLOCK_N)
        mask = (offs_n < last)[:, None] & mask_f[None, :]
        offs_h = offs_n[:, None] * W + offs_f[None, :]
        offs_y = offs_n[:, None] * F + offs_f[None, :]
        d_h = tl.load(dy_ptr + offs_y, mask=mask, other=0.0).to(tl.float32)
        if DROPOUT_P > 0:
            keep = _keep_scale(seed_ptr, offs_n, start, F, DROPOUT_P, BLOCK_N, BLOCK_F)
            d_h *= keep
        if h_ptr is not None:
            z = _load_biased(h_ptr, offs_h, mask, bias_ptr, bias)
        if weight_ptr is not None:
            active = tl.zeros_like(d_h) + bias[None, :]
            if h_ptr is not None:
                active = activate(z, ACTIVATION)
                if GATED:
                    active *= _load_biased(h_ptr + F, offs_h, mask, bias_ptr, up_bias)
            dot = tl.sum(d_h * active, axis=1)
            parts = tl.where((offs_b == block)[None, :], dot[:, None], 0.0)
            offs_dot = offs_n[:, None] * BLOCKS + offs_b[None, :]
            tl.store(dot_ptr + offs_dot, parts, mask=(offs_n < last)[:, None] & mine[None, :])
            weight = tl.load(weight_ptr + offs_n, mask=offs_n < last, other=0.0)[:, None]
            if active_ptr is not None:
                if DROPOUT_P > 0:
                    active *= keep
                active *= weight
                tl.store(active_ptr + offs_y, active.to(active_ptr.dtype.element_ty), mask=mask)
            d_h *= weight
        if h_ptr is not None:
            if GATED:
                d_up = d_h * activate(z, ACTIVATION)
                up_total += tl.sum(d_up, axis=0)
                if d_h_ptr is not None:
                    tl.store(d_h_ptr + F + offs_h, d_up.to(d_h_ptr.dtype.element_ty), mask=mask)
                d_h *= _load_biased(h_ptr + F, offs_h, mask, bias_ptr, up_bias)
            d_h *= activate_bwd(z, ACTIVATION)
        total += tl.sum(d_h, axis=0)
        if d_h_ptr is not None:
            tl.store(d_h_ptr + offs_h, d_h.to(d_h_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        tl.store(partial_ptr + pid * W + offs_f, total, mask=mask_f)
        if GATED:
            tl.store(partial_ptr + pid * W + F + offs_f, up_total, mask=mask_f)


@triton.jit(do_not_specialize=_DYNAMIC)
def _bias_act_bwd_db_kernel(
    d_bias_ptr,  # (e, W) - output
    partial_ptr,  # (Z, W) fp32 - sums over the rows of each tile
    offsets_ptr,  # (e,) int32 end row of each expert; None: rows_per_expert each
    num_rows,
    rows_per_expert,
    e,
    W: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid (e, cdiv(W, BLOCK_W)); adds up the tiles of each expert.

    Example: e = 2, rows_per_expert = 3, TILE = 2, partial [[1], [2], [3], [4]]
    -> d_bias [[3], [7]].
    """
    expert = tl.program_id(0).to(tl.int64)
    if offsets_ptr is not None:
        index, _, _, tiles = ragged_tiles(offsets_ptr, num_rows, e, TILE, BLOCK_EXPERTS)
        first = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
        count = tl.sum(tl.where(index == expert, tiles, 0), axis=0)
    else:
        count = tl.cdiv(rows_per_expert, TILE).to(tl.int64)
        first = expert * count
    offs_w = tl.program_id(1).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask_w = offs_w < W
    acc = tl.zeros([BLOCK_W], tl.float32)
    for start in range(0, count, BLOCK_Z):
        offs_z = start + tl.arange(0, BLOCK_Z).to(tl.int64)
        mask = (offs_z < count)[:, None] & mask_w[None, :]
        offs = (first + offs_z)[:, None] * W + offs_w[None, :]
        acc += tl.sum(tl.load(partial_ptr + offs, mask=mask, other=0.0), axis=0)
    tl.store(d_bias_ptr + expert * W + offs_w, acc.to(d_bias_ptr.dtype.element_ty), mask=mask_w)


def _checked_options(rows, width, bias, offsets, dropout_p, seed, *, sums):
    """Return bias, offsets and seed; the number of tiles, which may write sums; the sizes."""
    num_experts = rows.shape[0] if offsets is None else offsets.shape[0]
    bias = checked("bias", bias, (num_experts, width), FLOAT_DTYPES, rows.device)
    offsets = checked("offsets", offsets, (num_experts,), INT32, rows.device)
    if dropout_p > 0:
        if seed is None:
            raise ValueError("dropout needs a seed")
        check_tensor("seed", seed, (), (torch.int64,), rows.device)
    num_rows, rows_per_expert = math.prod(rows.shape[:-1]), 0
    tile = act_tile_rows(num_rows, rows.shape[-1]) if sums else ACT_TILE_ROWS[0]
    if offsets is None:
        rows_per_expert = rows.shape[1]
        num_tiles = num_experts * cdiv(rows_per_expert, tile)
    else:  # an upper bound: every expert, and the tail, may leave its last tile part empty
        num_tiles = num_rows // tile + num_experts + 1
    sizes = {
        "num_rows": num_rows,
        "rows_per_expert": rows_per_expert,
        "e": num_experts,
        "TILE": tile,
        "BLOCK_EXPERTS": next_power_of_2(num_experts + 1),
    }
    return (bias, offsets, seed), num_tiles, sizes


def _launch(kernel, dtype, tensors, num_tiles, sizes, F, activation, dropout_p) -> None:
    launch(
        kernel,
        lambda meta: (num_tiles, cdiv(F, meta["BLOCK_F"])),
        sizes["num_rows"],
        dtype,
        *tensors,
        **sizes,
        F=F,
        ACTIVATION=FORMULA[GATES.get(activation, activation)],
        GATED=activation in GATES,
        DROPOUT_P=dropout_p,
    )


def bias_act_fwd(
    h: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Return dropout(activation(h + bias)), gated dropout(activation(gate) * up), computed in fp32.

    Args:
        h: (e, N, F), or (R, F) with ``offsets``, fp32, fp16 or bf16, the result's dtype; gated
            (..., 2F): gate and up are the halves of h + bias.
        bias: (e, F), gated (e, 2F); or None.
        offsets: (e,) int32 end row of each expert; rows past the last are neither read nor written.
        seed: int64 scalar tensor; needed when dropout_p > 0.
    """
    *rows, width = h.shape
    F = width // 2 if activation in GATES else width
    if activation in GATES and width % 2:
        raise ValueError(f"h must have a gate and a value for each unit, got {tuple(h.shape)}")
    h = checked("h", h, (*rows, width), FLOAT_DTYPES, h.device)
    given = h, width, bias, offsets, dropout_p, seed
    options, num_tiles, sizes = _checked_options(*given, sums=False)
    y = h.new_empty((*rows, F))
    if y.numel() > 0:
        with device_guard(h):
            work = h.dtype, (y, h, *options), num_tiles, sizes, F
            _launch(_bias_act_fwd_kernel, *work, activation, dropout_p)
    return y


def bias_act_bwd(
    dy: Tensor,
    h: Tensor | None,
    bias: Tensor | None,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    needs_h: bool = True,
    weighted: tuple[Tensor | None, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`bias_act_fwd`: d_h like h, d_bias like bias, (0,) of no bias.

    ``h`` is not read for ``linear``; without ``needs_h`` d_h has shape (0,). Deterministic for one
    choice of tiles; d_bias is summed in their order (see ``_autotune``). ``weighted`` has the
    outputs active and dot, and the weight, of the kernel.
    """
    if activation == "linear" and (weighted is None or weighted[0] is None):
        h = None
    elif h is None:
        raise ValueError(f"the gradient of {activation} needs h")
    *rows, F = dy.shape
    W = 2 * F if activation in GATES else F
    dy = checked("dy", dy, (*rows, F), FLOAT_DTYPES, dy.device)
    h = checked("h", h, (*rows, W), FLOAT_DTYPES, dy.device)
    given = dy, W, bias, offsets, dropout_p, seed
    (bias, *rest), num_tiles, sizes = _checked_options(*given, sums=bias is not None)
    d_h = dy.new_empty((*rows, W) if needs_h else 0)
    d_bias, partial_ZW = dy.new_empty(0), None
    if bias is not None:
        d_bias = torch.empty_like(bias)
        partial_ZW = dy.new_empty((num_tiles, W), dtype=torch.float32)
    if dy.numel() == 0:
        return d_h, d_bias.zero_()
    active, dot, weight_R = weighted or (None, None, None)
    blocks = 1 if dot is None else dot.shape[1]
    with device_guard(dy):
        outputs = d_h if needs_h else None, partial_ZW, active, dot
        tensors = *outputs, weight_R, dy, h, bias, *rest
        work = dy.dtype, tensors, num_tiles, {**sizes, "BLOCKS": blocks}, F
        _launch(_bias_act_bwd_dh_kernel, *work, activation, dropout_p)
        if bias is not None:
            _bias_act_bwd_db_kernel[(sizes["e"], cdiv(W, SUM_BLOCK_COLS))](
                d_bias,
                partial_ZW,
                rest[0],
                **sizes,
                W=W,
                BLOCK_Z=SUM_BLOCK_ROWS,
                BLOCK_W=SUM_BLOCK_COLS,
            )
    return d_h, d_bias
