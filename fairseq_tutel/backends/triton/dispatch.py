"""Tokens to expert rows and back: two kernels, each reading and writing every row once.

* ``_token_to_rows``: dispatch forward, and combine backward (which adds the gate gradient).
* ``_rows_to_token``: combine forward, and dispatch backward (with weights: their gradient).

Both take one token per tile row: the token is read (or written) once for all its K rows, where a
program per expert row would read it K times. Rows that no token occupies are zeroed by further
programs of the same launch, which find them in the inverse map. Loads and stores use the tensor's
own dtype, sums are fp32.

Legend: T tokens, K top-k (``TOP_K`` in kernels), M model dim, R rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import ROWS_PER_PROGRAM, launch, move_configs, prune_wide_tiles
from ._pairs import MAX_UNROLL, add_dot, load_pair, load_rows, store_rows
from ._runtime import FLOAT_DTYPES, check_tensor, device_guard

_DYNAMIC = ["num_tokens", "num_rows"]
_PRUNE = {"early_config_prune": prune_wide_tiles}


@triton.autotune(move_configs(), key=["M", "TOP_K", "HAS_ROWS", "HAS_DOT"], prune_configs_by=_PRUNE)
@triton.jit(do_not_specialize=_DYNAMIC)
def _token_to_rows_kernel(
    rows_ptr,  # (R, M) - output: weight * x in the row of each pair, zero in unused rows
    dot_ptr,  # (T, K) fp32 - output: <x[t], other[row]>, 0 for dropped pairs; HAS_DOT
    x_ptr,  # (T, M)
    other_ptr,  # (R, M) - second factor of the scalar product; HAS_DOT
    weight_ptr,  # (T, K) float; HAS_WEIGHT
    row_ptr,  # (T, K) int32, -1 = dropped
    pair_ptr,  # (R,) int32 - inverse of row, -1 = unused
    num_tokens,
    num_rows,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_DOT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_T) + cdiv(R, ROWS_PER_PROGRAM),): first tokens, then unused rows.

    Example: x [[1], [2]], row [[1, -1], [2, 0]], weight [[1, 1], [10, 100]], R = 4
    -> rows [[200], [1], [20], [0]]; with other [[1], [2], [3], [4]]: dot [[2, 0], [6, 2]].
    """
    pid = tl.program_id(0).to(tl.int64)
    num_token_blocks = tl.cdiv(num_tokens, BLOCK_T)
    if pid < num_token_blocks:
        offs_t = pid * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = offs_t < num_tokens
        offs_k = tl.arange(0, BLOCK_K)
        dot = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        if TOP_K <= MAX_UNROLL:
            pairs = ()
            for k in tl.static_range(TOP_K):
                pairs += (load_pair(row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT),)
        for start in range(0, M, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            mask_x = mask_t[:, None] & (offs_m < M)[None, :]
            x = tl.load(x_ptr + offs_t[:, None] * M + offs_m[None, :], mask=mask_x, other=0.0)
            if TOP_K <= MAX_UNROLL:
                others = ()
                if HAS_DOT:
                    for k in tl.static_range(TOP_K):
                        others += (load_rows(other_ptr, pairs[k][0], offs_m, M),)
                if HAS_ROWS:
                    for k in tl.static_range(TOP_K):
                        row, weight = pairs[k]
                        store_rows(rows_ptr, x, row, weight, offs_m, M, HAS_WEIGHT)
                if HAS_DOT:
                    for k in tl.static_range(TOP_K):
                        dot = add_dot(dot, x, others[k], k)
            else:
                for k in range(TOP_K):
                    row, weight = load_pair(
                        row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT
                    )
                    if HAS_DOT:
                        dot = add_dot(dot, x, load_rows(other_ptr, row, offs_m, M), k)
                    if HAS_ROWS:
                        store_rows(rows_ptr, x, row, weight, offs_m, M, HAS_WEIGHT)
        if HAS_DOT:
            offs = offs_t[:, None] * TOP_K + offs_k[None, :]
            mask = mask_t[:, None] & (offs_k < TOP_K)[None, :]
            tl.store(dot_ptr + offs, dot.to(dot_ptr.dtype.element_ty), mask=mask)
    elif HAS_ROWS:
        tl.static_assert(ROWS_PER_PROGRAM % BLOCK_T == 0)
        zero = tl.zeros([BLOCK_T, BLOCK_M], rows_ptr.dtype.element_ty)
        first = (pid - num_token_blocks) * ROWS_PER_PROGRAM
        for step in range(0, ROWS_PER_PROGRAM, BLOCK_T):
            offs_r = first + step + tl.arange(0, BLOCK_T)
            # Past the last row the pair reads as used, so nothing is written there.
            unused = tl.load(pair_ptr + offs_r, mask=offs_r < num_rows, other=0) < 0
            if tl.max(unused.to(tl.int32), axis=0) > 0:
                for start in range(0, M, BLOCK_M):
                    offs_m = start + tl.arange(0, BLOCK_M)
                    mask = unused[:, None] & (offs_m < M)[None, :]
                    tl.store(rows_ptr + offs_r[:, None] * M + offs_m[None, :], zero, mask=mask)


@triton.autotune(move_configs(), key=["M", "TOP_K", "HAS_SUM", "HAS_DOT"], prune_configs_by=_PRUNE)
@triton.jit(do_not_specialize=_DYNAMIC)
def _rows_to_token_kernel(
    y_ptr,  # (T, M) - output: sum over the pairs of weight * rows; HAS_SUM
    dot_ptr,  # (T, K) fp32 - output: <other[t], rows[row]>, 0 for dropped pairs; HAS_DOT
    rows_ptr,  # (R, M)
    other_ptr,  # (T, M) - second factor of the scalar product; HAS_DOT
    weight_ptr,  # (T, K) float; HAS_WEIGHT
    row_ptr,  # (T, K) int32, -1 = dropped
    num_tokens,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_DOT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_T),).

    Example: rows [[1], [2], [3]], row [[1, -1], [2, 0]], weight [[1, 1], [10, 100]]
    -> y [[2], [130]]; with other [[1], [2]]: dot [[2, 0], [6, 2]].
    """
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tokens
    offs_k = tl.arange(0, BLOCK_K)
    dot = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if TOP_K <= MAX_UNROLL:
        pairs = ()
        for k in tl.static_range(TOP_K):
            pairs += (load_pair(row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT),)
    for start in range(0, M, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_y = mask_t[:, None] & (offs_m < M)[None, :]
        offs_y = offs_t[:, None] * M + offs_m[None, :]
        acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        if HAS_DOT:
            other = tl.load(other_ptr + offs_y, mask=mask_y, other=0.0)
        if TOP_K <= MAX_UNROLL:
            values = ()
            for k in tl.static_range(TOP_K):
                values += (load_rows(rows_ptr, pairs[k][0], offs_m, M),)
            for k in tl.static_range(TOP_K):
                acc += values[k].to(tl.float32) * pairs[k][1][:, None]
            if HAS_DOT:
                for k in tl.static_range(TOP_K):
                    dot = add_dot(dot, values[k], other, k)
        else:
            for k in range(TOP_K):
                row, weight = load_pair(row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT)
                value = load_rows(rows_ptr, row, offs_m, M)
                acc += value.to(tl.float32) * weight[:, None]
                if HAS_DOT:
                    dot = add_dot(dot, value, other, k)
        if HAS_SUM:
            tl.store(y_ptr + offs_y, acc.to(y_ptr.dtype.element_ty), mask=mask_y)
    if HAS_DOT:
        offs = offs_t[:, None] * TOP_K + offs_k[None, :]
        mask = mask_t[:, None] & (offs_k < TOP_K)[None, :]
        tl.store(dot_ptr + offs, dot.to(dot_ptr.dtype.element_ty), mask=mask)


def _check(
    token_TM: Tensor | None,
    rows_RM: Tensor | None,
    row_TK: Tensor,
    pair_R: Tensor,
    weight_TK: Tensor | None,
) -> None:
    (T, K), R = row_TK.shape, pair_R.numel()
    M, device = next((t.shape[1], t.device) for t in (token_TM, rows_RM) if t is not None)
    if M == 0 or K == 0:
        raise ValueError(f"model dim and top-k must be at least 1, got {M} and {K}")
    check_tensor("row", row_TK, (T, K), (torch.int32,), device)
    check_tensor("pair", pair_R, (R,), (torch.int32,), device)
    if token_TM is not None:
        check_tensor("tokens", token_TM, (T, M), FLOAT_DTYPES, device)
    if rows_RM is not None:
        check_tensor("rows", rows_RM, (R, M), FLOAT_DTYPES, device)
    if weight_TK is not None:
        check_tensor("weight", weight_TK, (T, K), FLOAT_DTYPES, device)


def _token_to_rows(
    x_TM: Tensor,
    row_TK: Tensor,
    pair_R: Tensor,
    weight_TK: Tensor | None,
    *,
    rows_RM: Tensor | None,
    other_RM: Tensor | None = None,
    dot_TK: Tensor | None = None,
) -> None:
    T, M = x_TM.shape
    K, R = row_TK.shape[1], pair_R.shape[0]
    has_rows = rows_RM is not None
    if T == 0 and (R == 0 or not has_rows):
        return

    def grid(meta: dict) -> tuple[int]:
        row_blocks = triton.cdiv(R, ROWS_PER_PROGRAM) if has_rows else 0
        return (triton.cdiv(T, meta["BLOCK_T"]) + row_blocks,)

    with device_guard(x_TM):
        launch(
            _token_to_rows_kernel,
            grid,
            row_TK.numel(),
            rows_RM,
            dot_TK,
            x_TM.contiguous(),
            other_RM,
            None if weight_TK is None else weight_TK.contiguous(),
            row_TK.contiguous(),
            pair_R.contiguous(),
            T,
            R,
            M=M,
            TOP_K=K,
            HAS_WEIGHT=weight_TK is not None,
            HAS_ROWS=has_rows,
            HAS_DOT=dot_TK is not None,
            BLOCK_K=triton.next_power_of_2(K),
            ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        )


def _rows_to_token(
    rows_RM: Tensor,
    row_TK: Tensor,
    weight_TK: Tensor | None,
    *,
    y_TM: Tensor | None,
    other_TM: Tensor | None = None,
    dot_TK: Tensor | None = None,
) -> None:
    T, K = row_TK.shape
    M = rows_RM.shape[1]
    if T == 0:
        return

    def grid(meta: dict) -> tuple[int]:
        return (triton.cdiv(T, meta["BLOCK_T"]),)

    with device_guard(rows_RM):
        launch(
            _rows_to_token_kernel,
            grid,
            row_TK.numel(),
            y_TM,
            dot_TK,
            rows_RM.contiguous(),
            other_TM,
            None if weight_TK is None else weight_TK.contiguous(),
            row_TK.contiguous(),
            T,
            M=M,
            TOP_K=K,
            HAS_WEIGHT=weight_TK is not None,
            HAS_SUM=y_TM is not None,
            HAS_DOT=dot_TK is not None,
            BLOCK_K=triton.next_power_of_2(K),
        )


def dispatch_fwd(
    x_TM: Tensor, row_TK: Tensor, pair_R: Tensor, weight_TK: Tensor | None = None
) -> Tensor:
    """:func:`fairseq_tutel.backends.torch.dispatch_fwd` in Triton; fp32, fp16 or bf16.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check(x_TM, None, row_TK, pair_R, weight_TK)
    rows_RM = x_TM.new_empty((pair_R.shape[0], x_TM.shape[1]))
    _token_to_rows(x_TM, row_TK, pair_R, weight_TK, rows_RM=rows_RM)
    return rows_RM


def combine_fwd(
    rows_RM: Tensor, row_TK: Tensor, pair_R: Tensor, weight_TK: Tensor | None
) -> Tensor:
    """:func:`fairseq_tutel.backends.torch.combine_fwd` in Triton; fp32, fp16 or bf16.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    y_TM = rows_RM.new_empty((row_TK.shape[0], rows_RM.shape[1]))
    _check(y_TM, rows_RM, row_TK, pair_R, weight_TK)
    _rows_to_token(rows_RM, row_TK, weight_TK, y_TM=y_TM)
    return y_TM


def combine_bwd(
    dy_TM: Tensor,
    rows_RM: Tensor,
    row_TK: Tensor,
    pair_R: Tensor,
    weight_TK: Tensor,
    *,
    needs_rows: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.combine_bwd` in Triton; both gradients in one kernel.

    Deterministic for one choice of tiles; d_weight is summed in their order (see ``_autotune``).

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check(dy_TM, rows_RM, row_TK, pair_R, weight_TK)
    d_rows_RM = torch.empty(
        rows_RM.shape if needs_rows else 0, dtype=rows_RM.dtype, device=rows_RM.device
    )
    d_weight_TK = weight_TK.new_empty(weight_TK.shape if needs_weight else 0)
    if needs_rows or needs_weight:
        _token_to_rows(
            dy_TM,
            row_TK,
            pair_R,
            weight_TK,
            rows_RM=d_rows_RM if needs_rows else None,
            other_RM=rows_RM.contiguous(),
            dot_TK=d_weight_TK if needs_weight else None,
        )
    return d_rows_RM, d_weight_TK


def dispatch_bwd(
    d_rows_RM: Tensor,
    x_TM: Tensor,
    row_TK: Tensor,
    pair_R: Tensor,
    weight_TK: Tensor | None = None,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.dispatch_bwd` in Triton; both gradients in one kernel.

    Deterministic for one choice of tiles; d_weight is summed in their order (see ``_autotune``).

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    T, M = row_TK.shape[0], d_rows_RM.shape[1]
    needs_weight = needs_weight and weight_TK is not None
    d_x_TM = d_rows_RM.new_empty((T, M) if needs_x else 0)
    d_weight_TK = d_rows_RM.new_empty(0, dtype=torch.float32)
    if needs_weight:
        d_weight_TK = weight_TK.new_empty(weight_TK.shape)
    # Without a gradient of the weights x is not read, and the caller need not keep it.
    _check(x_TM if needs_weight else None, d_rows_RM, row_TK, pair_R, weight_TK)
    if needs_x or needs_weight:
        _rows_to_token(
            d_rows_RM,
            row_TK,
            weight_TK,
            y_TM=d_x_TM if needs_x else None,
            other_TM=x_TM.contiguous() if needs_weight else None,
            dot_TK=d_weight_TK if needs_weight else None,
        )
    return d_x_TM, d_weight_TK
