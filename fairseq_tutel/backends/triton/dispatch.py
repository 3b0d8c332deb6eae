"""Tokens to expert rows and back: two kernels, each reading and writing every row once.

* ``_token_to_rows``: dispatch forward, and combine backward (which adds the gate gradient).
* ``_rows_to_token``: combine forward, and dispatch backward.

Both take one token per tile row: the token is read (or written) once for all its K rows, where a
program per expert row would read it K times. Rows that no token occupies are zeroed by further
programs of the same launch, which find them in the inverse map. Loads and stores use the tensor's
own dtype, sums are fp32.
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
    dest_row_ptr,  # (T, K) int32, -1 = dropped
    src_pair_ptr,  # (R,) int32 - inverse of dest_row, -1 = unused
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

    Example: x [[1], [2]], dest_row [[1, -1], [2, 0]], weight [[1, 1], [10, 100]], R = 4
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
                pairs += (
                    load_pair(dest_row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT),
                )
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
                        dest_row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT
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
            unused = tl.load(src_pair_ptr + offs_r, mask=offs_r < num_rows, other=0) < 0
            if tl.max(unused.to(tl.int32), axis=0) > 0:
                for start in range(0, M, BLOCK_M):
                    offs_m = start + tl.arange(0, BLOCK_M)
                    mask = unused[:, None] & (offs_m < M)[None, :]
                    tl.store(rows_ptr + offs_r[:, None] * M + offs_m[None, :], zero, mask=mask)


@triton.autotune(move_configs(), key=["M", "TOP_K", "HAS_WEIGHT"], prune_configs_by=_PRUNE)
@triton.jit(do_not_specialize=_DYNAMIC)
def _rows_to_token_kernel(
    y_ptr,  # (T, M) - output: sum over the pairs of weight * rows
    rows_ptr,  # (R, M)
    weight_ptr,  # (T, K) float; HAS_WEIGHT
    dest_row_ptr,  # (T, K) int32, -1 = dropped
    num_tokens,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_T),).

    Example: rows [[1], [2], [3]], dest_row [[1, -1], [2, 0]], weight [[1, 1], [10, 100]]
    -> y [[2], [130]].
    """
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tokens
    if TOP_K <= MAX_UNROLL:
        pairs = ()
        for k in tl.static_range(TOP_K):
            pairs += (load_pair(dest_row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT),)
    for start in range(0, M, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_y = mask_t[:, None] & (offs_m < M)[None, :]
        offs_y = offs_t[:, None] * M + offs_m[None, :]
        acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        if TOP_K <= MAX_UNROLL:
            values = ()
            for k in tl.static_range(TOP_K):
                values += (load_rows(rows_ptr, pairs[k][0], offs_m, M),)
            for k in tl.static_range(TOP_K):
                acc += values[k].to(tl.float32) * pairs[k][1][:, None]
        else:
            for k in range(TOP_K):
                row, weight = load_pair(
                    dest_row_ptr, weight_ptr, offs_t, mask_t, k, TOP_K, HAS_WEIGHT
                )
                acc += load_rows(rows_ptr, row, offs_m, M).to(tl.float32) * weight[:, None]
        tl.store(y_ptr + offs_y, acc.to(y_ptr.dtype.element_ty), mask=mask_y)


def _check(
    dest_row_TK: Tensor,
    src_pair_R: Tensor | None,
    like: Tensor,
    topk_weight_TK: Tensor | None = None,
    **tensors: tuple[Tensor, int],
) -> None:
    """Maps and weights by their shapes, tensors (name=(tensor, rows)) by their width, too."""
    T, K = dest_row_TK.shape
    M, device = like.shape[1], like.device
    if M == 0 or K == 0:
        raise ValueError(f"model dim and top-k must be at least 1, got {M} and {K}")
    check_tensor("dest_row", dest_row_TK, (T, K), (torch.int32,), device)
    if src_pair_R is not None:
        check_tensor("src_pair", src_pair_R, (src_pair_R.numel(),), (torch.int32,), device)
    for name, (tensor, rows) in tensors.items():
        check_tensor(name, tensor, (rows, M), FLOAT_DTYPES, device)
    if topk_weight_TK is not None:
        check_tensor("topk_weight", topk_weight_TK, (T, K), FLOAT_DTYPES, device)


def _token_to_rows(
    x_TM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    topk_weight_TK: Tensor | None,
    *,
    rows_RM: Tensor | None,
    other_RM: Tensor | None = None,
    dot_TK: Tensor | None = None,
) -> None:
    T, M = x_TM.shape
    K, R = dest_row_TK.shape[1], src_pair_R.shape[0]
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
            dest_row_TK.numel(),
            rows_RM,
            dot_TK,
            x_TM.contiguous(),
            other_RM,
            None if topk_weight_TK is None else topk_weight_TK.contiguous(),
            dest_row_TK.contiguous(),
            src_pair_R.contiguous(),
            T,
            R,
            M=M,
            TOP_K=K,
            HAS_WEIGHT=topk_weight_TK is not None,
            HAS_ROWS=has_rows,
            HAS_DOT=dot_TK is not None,
            BLOCK_K=triton.next_power_of_2(K),
            ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        )


def _rows_to_token(rows_RM: Tensor, dest_row_TK: Tensor, topk_weight_TK: Tensor | None) -> Tensor:
    T, K = dest_row_TK.shape
    M = rows_RM.shape[1]
    y_TM = torch.empty((T, M), dtype=rows_RM.dtype, device=rows_RM.device)
    if T == 0:
        return y_TM

    def grid(meta: dict) -> tuple[int]:
        return (triton.cdiv(T, meta["BLOCK_T"]),)

    with device_guard(rows_RM):
        launch(
            _rows_to_token_kernel,
            grid,
            dest_row_TK.numel(),
            y_TM,
            rows_RM.contiguous(),
            None if topk_weight_TK is None else topk_weight_TK.contiguous(),
            dest_row_TK.contiguous(),
            T,
            M=M,
            TOP_K=K,
            HAS_WEIGHT=topk_weight_TK is not None,
        )
    return y_TM


def dispatch_fwd(x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """:func:`fairseq_tutel.backends.torch.dispatch_fwd` in Triton; fp32, fp16 or bf16.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    T, R = dest_row_TK.shape[0], src_pair_R.numel()
    _check(dest_row_TK, src_pair_R, x_TM, tokens=(x_TM, T))
    rows_RM = x_TM.new_empty((R, x_TM.shape[1]))
    _token_to_rows(x_TM, dest_row_TK, src_pair_R, None, rows_RM=rows_RM)
    return rows_RM


def dispatch_bwd(d_rows_RM: Tensor, dest_row_TK: Tensor) -> Tensor:
    """:func:`fairseq_tutel.backends.torch.dispatch_bwd` in Triton; fp32, fp16 or bf16.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check(dest_row_TK, None, d_rows_RM, d_rows=(d_rows_RM, d_rows_RM.shape[0]))
    return _rows_to_token(d_rows_RM, dest_row_TK, None)


def combine_fwd(rows_RM: Tensor, dest_row_TK: Tensor, topk_weight_TK: Tensor) -> Tensor:
    """:func:`fairseq_tutel.backends.torch.combine_fwd` in Triton; fp32, fp16 or bf16.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check(dest_row_TK, None, rows_RM, topk_weight_TK, rows=(rows_RM, rows_RM.shape[0]))
    return _rows_to_token(rows_RM, dest_row_TK, topk_weight_TK)


def combine_bwd(
    dy_TM: Tensor,
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    topk_weight_TK: Tensor,
    *,
    needs_rows: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.combine_bwd` in Triton; both gradients in one kernel.

    Deterministic for one choice of tiles; d_weight is summed in their order (see ``_autotune``).

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    T, R = dest_row_TK.shape[0], src_pair_R.numel()
    _check(dest_row_TK, src_pair_R, rows_RM, topk_weight_TK, dy=(dy_TM, T), rows=(rows_RM, R))
    device = rows_RM.device
    d_rows_RM = torch.empty(rows_RM.shape if needs_rows else 0, dtype=rows_RM.dtype, device=device)
    d_weight_TK = topk_weight_TK.new_empty(topk_weight_TK.shape if needs_weight else 0)
    if needs_rows or needs_weight:
        _token_to_rows(
            dy_TM,
            dest_row_TK,
            src_pair_R,
            topk_weight_TK,
            rows_RM=d_rows_RM if needs_rows else None,
            other_RM=rows_RM.contiguous(),
            dot_TK=d_weight_TK if needs_weight else None,
        )
    return d_rows_RM, d_weight_TK
