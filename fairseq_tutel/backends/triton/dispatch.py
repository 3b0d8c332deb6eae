"""Tokens to expert rows and back: two kernels, each reading and writing every row once.

* ``_token_to_rows``: dispatch forward, and combine backward (which adds the gate gradient).
* ``_rows_to_token``: combine forward, and dispatch backward.

Both take one token per tile row: the token is read (or written) once for all its K rows, where a
program per expert row would read it K times. Rows that no token occupies are zeroed by further
programs of the same launch, which find them in the inverse map. Loads and stores use the tensor's
own dtype, sums are fp32.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import MOVE_TILES, ROWS_PER_PROGRAM, Tuned, launch, narrow_tiles
from ._runtime import FLOAT_DTYPES, INT32, checked, device_guard
from ._sizes import cdiv, next_power_of_2

_DYNAMIC = ["num_tokens", "num_rows"]
_tuned = partial(Tuned, tiles=MOVE_TILES, fitting=narrow_tiles, keys=("M", "TOP_K"))
# Up to this top-k a token's rows are written out one after the other, so that the loads of all are
# under way at once; their indices and weights are then loaded before the loop over M.
_MAX_UNROLL = tl.constexpr(4)


@triton.jit
def _load_pair(dest_row_ptr, weight_ptr, expert_ptr, offs_t, mask_t, k, TOP_K: tl.constexpr):
    """Load row (int64, -1 = dropped), fp32 weight and expert of choice k of a tile of tokens.

    The weight of a dropped pair may be anything, NaN included; it counts as 0.
    """
    offs = offs_t * TOP_K + k
    row = tl.load(dest_row_ptr + offs, mask=mask_t, other=-1).to(tl.int64)
    weight = tl.full(row.shape, 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offs, mask=row >= 0, other=0.0).to(tl.float32)
    expert = row
    if expert_ptr is not None:
        expert = tl.load(expert_ptr + offs, mask=row >= 0, other=0).to(tl.int64)
    return row, weight, expert


@triton.jit
def _load_rows(rows_ptr, row, bias_ptr, expert, offs_m, M: tl.constexpr):
    """Load a tile of rows (tokens x columns) plus their experts' biases; 0 for dropped pairs."""
    mask = (row >= 0)[:, None] & (offs_m < M)[None, :]
    rows = tl.load(rows_ptr + row[:, None] * M + offs_m[None, :], mask=mask, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert[:, None] * M + offs_m[None, :], mask=mask, other=0.0)
        rows = rows.to(tl.float32) + bias.to(tl.float32)
    return rows


@triton.jit
def _store_rows(rows_ptr, x, row, weight_ptr, weight, offs_m, M: tl.constexpr):
    """Store weight * x, without weights x, to a tile of rows; nothing for dropped pairs."""
    value = x
    if weight_ptr is not None:
        value = x.to(tl.float32) * weight[:, None]
    mask = (row >= 0)[:, None] & (offs_m < M)[None, :]
    offs = row[:, None] * M + offs_m[None, :]
    tl.store(rows_ptr + offs, value.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_dot(dot, a, b, k):
    """Add <a, b> of a tile of tokens to column k of their sums."""
    part = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    offs_k = tl.arange(0, dot.shape[1])
    return dot + tl.where(offs_k[None, :] == k, part[:, None], 0.0)


@_tuned
@triton.jit(do_not_specialize=_DYNAMIC)
def _token_to_rows_kernel(
    rows_ptr,  # (R, M) - output, or None: weight * x in the row of each pair, 0 in unused rows
    dot_ptr,  # (T, K) fp32 - output, or None: <x[t], other[row]>, 0 for dropped pairs
    share_ptr,  # (T, E) - output, or None: sum of a token's weights of kept pairs by expert
    x_ptr,  # (T, M)
    other_ptr,  # (R, M) - second factor of the scalar product, or None
    bias_ptr,  # (E, M) - added to ``other`` by expert, or None
    expert_ptr,  # (T, K) int32 - with bias_ptr or share_ptr
    weight_ptr,  # (T, K) fp32 or another float, or None
    dest_row_ptr,  # (T, K) int32, -1 = dropped
    src_pair_ptr,  # (R,) int32 - inverse of dest_row, -1 = unused
    num_tokens,
    num_rows,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_T) + cdiv(R, ROWS_PER_PROGRAM),): first tokens, then unused rows.

    Example: x [[1], [2]], dest_row [[1, -1], [2, 0]], weight [[1, 1], [10, 100]], R = 4
    -> rows [[200], [1], [20], [0]]; with other [[1], [2], [3], [4]]: dot [[2, 0], [6, 2]];
    and with bias [[10], [20]], expert [[0, 1], [1, 0]]: dot [[12, 0], [46, 22]],
    share [[1, 0], [100, 10]].
    """
    pid = tl.program_id(0).to(tl.int64)
    num_token_blocks = tl.cdiv(num_tokens, BLOCK_T)
    if pid < num_token_blocks:
        offs_t = pid * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = offs_t < num_tokens
        offs_k = tl.arange(0, BLOCK_K)
        dot = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        if share_ptr is not None:
            offs_e = tl.arange(0, BLOCK_E)
            share = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
            for k in range(TOP_K):
                _, weight, expert = _load_pair(
                    dest_row_ptr, weight_ptr, expert_ptr, offs_t, mask_t, k, TOP_K
                )
                share += tl.where(offs_e[None, :] == expert[:, None], weight[:, None], 0.0)
            offs = offs_t[:, None] * E + offs_e[None, :]
            mask = mask_t[:, None] & (offs_e < E)[None, :]
            tl.store(share_ptr + offs, share.to(share_ptr.dtype.element_ty), mask=mask)
        if TOP_K <= _MAX_UNROLL:
            pairs = ()
            for k in tl.static_range(TOP_K):
                pair = _load_pair(dest_row_ptr, weight_ptr, expert_ptr, offs_t, mask_t, k, TOP_K)
                pairs += (pair,)
        for start in range(0, M, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            mask_x = mask_t[:, None] & (offs_m < M)[None, :]
            x = tl.load(x_ptr + offs_t[:, None] * M + offs_m[None, :], mask=mask_x, other=0.0)
            if TOP_K <= _MAX_UNROLL:
                others = ()
                if dot_ptr is not None:
                    for k in tl.static_range(TOP_K):
                        row, _, expert = pairs[k]
                        others += (_load_rows(other_ptr, row, bias_ptr, expert, offs_m, M),)
                if rows_ptr is not None:
                    for k in tl.static_range(TOP_K):
                        row, weight, _ = pairs[k]
                        _store_rows(rows_ptr, x, row, weight_ptr, weight, offs_m, M)
                if dot_ptr is not None:
                    for k in tl.static_range(TOP_K):
                        dot = _add_dot(dot, x, others[k], k)
            else:
                for k in range(TOP_K):
                    row, weight, expert = _load_pair(
                        dest_row_ptr, weight_ptr, expert_ptr, offs_t, mask_t, k, TOP_K
                    )
                    if dot_ptr is not None:
                        other = _load_rows(other_ptr, row, bias_ptr, expert, offs_m, M)
                        dot = _add_dot(dot, x, other, k)
                    if rows_ptr is not None:
                        _store_rows(rows_ptr, x, row, weight_ptr, weight, offs_m, M)
        if dot_ptr is not None:
            offs = offs_t[:, None] * TOP_K + offs_k[None, :]
            mask = mask_t[:, None] & (offs_k < TOP_K)[None, :]
            tl.store(dot_ptr + offs, dot.to(dot_ptr.dtype.element_ty), mask=mask)
    elif rows_ptr is not None:
        tl.static_assert(ROWS_PER_PROGRAM % BLOCK_T == 0)
        zero = tl.zeros([BLOCK_T, BLOCK_M], rows_ptr.dtype.element_ty)
        first = (pid - num_token_blocks) * ROWS_PER_PROGRAM
        for step in range(0, ROWS_PER_PROGRAM, BLOCK_T):
            offs_r = first + step + tl.arange(0, BLOCK_T)
            # Past the last row the pair reads as used, so nothing is written there.
            unused = tl.load(src_pair_ptr + offs_r, mask=offs_r < num_rows, other=0) < 0
            if tl.max(unused.to(tl.int32), axis=0) > 0:
                for start in range(0, M, BLOCK_M):
                    offs_m = start + tl.arange(0, BLOCK_M)
                    mask = unused[:, None] & (offs_m < M)[None, :]
                    tl.store(rows_ptr + offs_r[:, None] * M + offs_m[None, :], zero, mask=mask)


@_tuned
@triton.jit(do_not_specialize=_DYNAMIC)
def _rows_to_token_kernel(
    y_ptr,  # (T, M) - output: sum over the pairs of weight * (rows + bias of the expert)
    rows_ptr,  # (R, M)
    bias_ptr,  # (E, M), or None
    expert_ptr,  # (T, K) int32 - with bias_ptr
    weight_ptr,  # (T, K) fp32 or another float, or None
    dest_row_ptr,  # (T, K) int32, -1 = dropped
    num_tokens,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_T),).

    Example: rows [[1], [2], [3]], dest_row [[1, -1], [2, 0]], weight [[1, 1], [10, 100]]
    -> y [[2], [130]]; with bias [[10], [20]], expert [[0, 1], [1, 0]]: y [[12], [1330]].
    """
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tokens
    if TOP_K <= _MAX_UNROLL:
        pairs = ()
        for k in tl.static_range(TOP_K):
            pair = _load_pair(dest_row_ptr, weight_ptr, expert_ptr, offs_t, mask_t, k, TOP_K)
            pairs += (pair,)
    for start in range(0, M, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_y = mask_t[:, None] & (offs_m < M)[None, :]
        offs_y = offs_t[:, None] * M + offs_m[None, :]
        acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        if TOP_K <= _MAX_UNROLL:
            values = ()
            for k in tl.static_range(TOP_K):
                row, _, expert = pairs[k]
                values += (_load_rows(rows_ptr, row, bias_ptr, expert, offs_m, M),)
            for k in tl.static_range(TOP_K):
                acc += values[k].to(tl.float32) * pairs[k][1][:, None]
        else:
            for k in range(TOP_K):
                row, weight, expert = _load_pair(
                    dest_row_ptr, weight_ptr, expert_ptr, offs_t, mask_t, k, TOP_K
                )
                value = _load_rows(rows_ptr, row, bias_ptr, expert, offs_m, M)
                acc += value.to(tl.float32) * weight[:, None]
        tl.store(y_ptr + offs_y, acc.to(y_ptr.dtype.element_ty), mask=mask_y)


def _checked_maps(dest_row_TK, src_pair_R, topk_weight_TK, M, device) -> tuple[Tensor | None, ...]:
    """Return the weights and both maps, checked."""
    T, K = dest_row_TK.shape
    if M == 0 or K == 0:
        raise ValueError(f"model dim and top-k must be at least 1, got {M} and {K}")
    weight_TK = checked("topk_weight", topk_weight_TK, (T, K), FLOAT_DTYPES, device)
    dest_row_TK = checked("dest_row", dest_row_TK, (T, K), INT32, device)
    if src_pair_R is not None:
        src_pair_R = checked("src_pair", src_pair_R, (src_pair_R.numel(),), INT32, device)
    return weight_TK, dest_row_TK, src_pair_R


def _checked_bias(bias_EM, expert_TK, shape_TK, M, device) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases and the expert of each pair, checked, or None twice."""
    if bias_EM is None:
        return None, None
    bias_EM = checked("bias", bias_EM, (bias_EM.shape[0], M), FLOAT_DTYPES, device)
    return bias_EM, checked("expert", expert_TK, shape_TK, INT32, device)


def _token_to_rows(
    x_TM: Tensor,
    maps: tuple[Tensor | None, ...],
    *,
    rows_RM: Tensor | None,
    other_RM: Tensor | None = None,
    dot_TK: Tensor | None = None,
    share_TE: Tensor | None = None,
    bias: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    (T, K), R = maps[1].shape, maps[2].shape[0]
    E = 1 if share_TE is None else share_TE.shape[1]
    if T == 0 and (R == 0 or rows_RM is None):
        return

    def grid(meta: dict) -> tuple[int]:
        row_blocks = 0 if rows_RM is None else cdiv(R, ROWS_PER_PROGRAM)
        return (cdiv(T, meta["BLOCK_T"]) + row_blocks,)

    with device_guard(x_TM):
        launch(
            _token_to_rows_kernel,
            grid,
            T * K,
            x_TM.dtype,
            rows_RM,
            dot_TK,
            share_TE,
            x_TM,
            other_RM,
            *bias,
            *maps,
            T,
            R,
            M=x_TM.shape[1],
            TOP_K=K,
            E=E,
            BLOCK_K=next_power_of_2(K),
            BLOCK_E=next_power_of_2(E),
            ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        )


def _rows_to_token(
    name: str,
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    topk_weight_TK: Tensor | None,
    bias_EM: Tensor | None = None,
    expert_TK: Tensor | None = None,
) -> Tensor:
    (R, M), (T, K) = rows_RM.shape, dest_row_TK.shape
    maps = _checked_maps(dest_row_TK, None, topk_weight_TK, M, rows_RM.device)
    bias = _checked_bias(bias_EM, expert_TK, (T, K), M, rows_RM.device)
    rows_RM = checked(name, rows_RM, (R, M), FLOAT_DTYPES, rows_RM.device)
    y_TM = rows_RM.new_empty((T, M))
    if T > 0:
        with device_guard(rows_RM):
            launch(
                _rows_to_token_kernel,
                lambda meta: (cdiv(T, meta["BLOCK_T"]),),
                T * K,
                rows_RM.dtype,
                y_TM,
                rows_RM,
                *bias,
                *maps[:2],
                T,
                M=M,
                TOP_K=K,
            )
    return y_TM


def dispatch_fwd(x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """Compute :func:`fairseq_tutel.backends.torch.dispatch_fwd` in Triton; fp32, fp16 or bf16."""
    T, M, device = dest_row_TK.shape[0], x_TM.shape[1], x_TM.device
    maps = _checked_maps(dest_row_TK, src_pair_R, None, M, device)
    x_TM = checked("tokens", x_TM, (T, M), FLOAT_DTYPES, device)
    rows_RM = x_TM.new_empty((src_pair_R.numel(), M))
    _token_to_rows(x_TM, maps, rows_RM=rows_RM)
    return rows_RM


def dispatch_bwd(d_rows_RM: Tensor, dest_row_TK: Tensor) -> Tensor:
    """Compute :func:`fairseq_tutel.backends.torch.dispatch_bwd` in Triton; fp32, fp16 or bf16."""
    return _rows_to_token("d_rows", d_rows_RM, dest_row_TK, None)


def combine_fwd(
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    topk_weight_TK: Tensor,
    bias_EM: Tensor | None = None,
    expert_TK: Tensor | None = None,
) -> Tensor:
    """Compute :func:`fairseq_tutel.backends.torch.combine_fwd` in Triton; fp32, fp16 or bf16."""
    return _rows_to_token("rows", rows_RM, dest_row_TK, topk_weight_TK, bias_EM, expert_TK)


def combine_bwd(
    dy_TM: Tensor,
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    topk_weight_TK: Tensor,
    bias_EM: Tensor | None = None,
    expert_TK: Tensor | None = None,
    *,
    needs_rows: bool = True,
    needs_weight: bool = True,
    needs_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.combine_bwd` in Triton.

    One kernel writes d_rows, d_weight and the weights by expert; d_bias is their product with dy.
    Deterministic for one choice of tiles; d_weight is summed in their order (see ``_autotune``).
    """
    (T, K), R = dest_row_TK.shape, src_pair_R.numel()
    M, device = rows_RM.shape[1], rows_RM.device
    maps = _checked_maps(dest_row_TK, src_pair_R, topk_weight_TK, M, device)
    bias = _checked_bias(bias_EM, expert_TK, (T, K), M, device)
    dy_TM = checked("dy", dy_TM, (T, M), FLOAT_DTYPES, device)
    rows_RM = checked("rows", rows_RM, (R, M), FLOAT_DTYPES, device)
    d_rows_RM = rows_RM.new_empty(rows_RM.shape if needs_rows else 0)
    d_weight_TK = topk_weight_TK.new_empty(topk_weight_TK.shape if needs_weight else 0)
    d_bias_EM, share_TE = rows_RM.new_empty(0), None
    if bias_EM is not None and needs_bias:
        share_TE = dy_TM.new_empty((T, bias_EM.shape[0]))
    if needs_rows or needs_weight or share_TE is not None:
        _token_to_rows(
            dy_TM,
            maps,
            rows_RM=d_rows_RM if needs_rows else None,
            other_RM=rows_RM if needs_weight else None,
            dot_TK=d_weight_TK if needs_weight else None,
            share_TE=share_TE,
            bias=bias,
        )
    if bias_EM is not None and share_TE is not None:
        d_bias_EM = torch.mm(share_TE.t(), dy_TM).to(bias_EM.dtype)
    return d_rows_RM, d_weight_TK, d_bias_EM
