"""Rows and weights of (token, choice) pairs in one launch, and the gradient of the gate values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import FLAT_BLOCK, SLOT_BLOCK
from ._runtime import FP32, INT32, checked, device_guard
from ._sizes import cdiv, next_power_of_2
from .slots import assign_slots, rank_in_blocks

_DYNAMIC = ["num_tokens", "num_rows", "num_token_blocks", "num_slot_blocks", "capacity"]
_EPSILON = tl.constexpr(torch.finfo(torch.float32).eps)


@triton.jit(do_not_specialize=_DYNAMIC)
def _assign_rows_fwd_kernel(
    dest_row_ptr,  # (T, K) int32 - output: row of each pair, -1 = not kept
    src_pair_ptr,  # (R,) int32 - output: pair t * K + k in each row, -1 = unused
    weight_ptr,  # (T, K) fp32 - output: 0 = not kept
    num_kept_ptr,  # (E,) int32 - output
    end_ptr,  # (E,) int32 - output: end of each expert's rows; not PADDED
    expert_ptr,  # (T, K) int32, -1 = not routed
    position_ptr,  # (T, K) int32, -1 = not routed; with hist_ptr: rank in the block of slots
    hist_ptr,  # (K, B, E) int32 - pairs of the expert before each block of slots, or None
    gate_ptr,  # (T, K) fp32
    num_routed_ptr,  # (K, E) int32
    num_tokens,
    num_rows,
    num_token_blocks,
    num_slot_blocks,
    capacity,  # T * K without one
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SLOTS: tl.constexpr,  # tokens of a block of slots
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (num_token_blocks + cdiv(R, BLOCK_R),): first tokens, then unused rows.

    Which rows stay unused follows from the counts, so no pass over the map marks them before. Where
    rows are not PADDED, every program computes the ends of all experts and writes the same numbers,
    so that it can look them up: a launch of its own would take longer.

    Example: C = 1, padded, expert [[1, 0], [1, 0]], position [[0, 0], [1, 1]],
    gate [[3/4, 1/4], [1/2, 1/2]], num_routed [[0, 2], [2, 0]], normalised
    -> dest_row [[1, 0], [-1, -1]], src_pair [1, 0], weight [[3/4, 1/4], [0, 0]], num_kept [1, 1].
    """
    pid = tl.program_id(0).to(tl.int64)
    if not PADDED:
        offs_e = tl.arange(0, BLOCK_E)
        count = tl.zeros([BLOCK_E], tl.int32)
        count_ptr = num_routed_ptr + offs_e
        for _ in range(TOP_K):
            count += tl.load(count_ptr, mask=offs_e < E, other=0)
            count_ptr += E
        count = tl.minimum(count, capacity)
        tl.store(num_kept_ptr + offs_e, count, mask=offs_e < E)
        tl.store(end_ptr + offs_e, tl.cumsum(count, axis=0), mask=offs_e < E)
        tl.debug_barrier()  # threads read what others of the program wrote
    if pid < num_token_blocks:
        offs_t = pid * BLOCK_T + tl.arange(0, BLOCK_T)
        offs_k = tl.arange(0, BLOCK_K)
        mask = (offs_t < num_tokens)[:, None] & (offs_k < TOP_K)[None, :]
        offs = offs_t[:, None] * TOP_K + offs_k[None, :]
        position = tl.load(position_ptr + offs, mask=mask, other=-1)
        expert = tl.load(expert_ptr + offs, mask=mask, other=-1).to(tl.int64)
        if hist_ptr is not None:
            block = offs_k.to(tl.int64)[None, :] * num_slot_blocks + (offs_t // SLOTS)[:, None]
            earlier = tl.load(hist_ptr + block * E + expert, mask=expert >= 0, other=0)
            position = tl.where(expert >= 0, position + earlier, -1)
        kept = (position >= 0) & (position < capacity)
        if PADDED:
            first = expert * capacity
        else:
            first = tl.load(end_ptr + expert - 1, mask=kept & (expert > 0), other=0).to(tl.int64)
        row = first + position
        tl.store(dest_row_ptr + offs, tl.where(kept, row, -1).to(tl.int32), mask=mask)
        tl.store(src_pair_ptr + row, offs.to(tl.int32), mask=kept)
        weight = tl.load(gate_ptr + offs, mask=kept, other=0.0)
        if NORMALIZE:
            total = tl.sum(weight, axis=1)
            weight = weight / tl.maximum(total, _EPSILON)[:, None]
        tl.store(weight_ptr + offs, weight, mask=mask)
    else:
        offs_r = (pid - num_token_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r = offs_r < num_rows
        if PADDED:
            expert_r = offs_r // capacity
            position_r = offs_r - expert_r * capacity
            num_kept = tl.zeros([BLOCK_R], tl.int32)
            count_ptr = num_routed_ptr + expert_r
            for _ in range(TOP_K):
                num_kept += tl.load(count_ptr, mask=mask_r, other=0)
                count_ptr += E
            num_kept = tl.minimum(num_kept, capacity)
            unused = position_r >= num_kept
            tl.store(num_kept_ptr + expert_r, num_kept, mask=mask_r & (position_r == 0))
        else:
            unused = offs_r >= tl.load(end_ptr + E - 1)
        none = tl.full([BLOCK_R], -1, tl.int32)
        tl.store(src_pair_ptr + offs_r, none, mask=mask_r & unused)


@triton.jit(do_not_specialize=_DYNAMIC)
def _assign_rows_bwd_kernel(
    d_gate_ptr,  # (T, K) fp32 - output
    d_weight_ptr,  # (T, K) fp32
    gate_ptr,  # (T, K) fp32
    dest_row_ptr,  # (T, K) int32, -1 = not kept
    num_tokens,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_T),); d_gate = kept * (d_w - <d_w, w>) / s, s = sum of kept gates.

    Example: gate [[1/4, 1/4]], dest_row [[0, 1]], d_weight [[1, 0]], normalised -> [[1, -1]].
    """
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_t < num_tokens)[:, None] & (offs_k < TOP_K)[None, :]
    offs = offs_t[:, None] * TOP_K + offs_k[None, :]
    kept = tl.load(dest_row_ptr + offs, mask=mask, other=-1) >= 0
    d_gate = tl.load(d_weight_ptr + offs, mask=kept, other=0.0)
    if NORMALIZE:
        gate = tl.load(gate_ptr + offs, mask=kept, other=0.0)
        total = tl.sum(gate, axis=1)
        divisor = tl.maximum(total, _EPSILON)
        inner = tl.sum(d_gate * gate, axis=1) / divisor
        inner = tl.where(total < divisor, 0.0, inner)
        d_gate = tl.where(kept, (d_gate - inner[:, None]) / divisor[:, None], 0.0)
    tl.store(d_gate_ptr + offs, d_gate, mask=mask)


def _tile(top_k: int) -> dict[str, int]:
    block_k = next_power_of_2(top_k)
    return {"BLOCK_T": max(1, FLAT_BLOCK // block_k), "BLOCK_K": block_k}


def assign_rows_fwd(
    expert_TK: Tensor,
    position_in_expert_TK: Tensor,
    gate_TK: Tensor,
    num_routed_KE: Tensor,
    *,
    capacity: int | None,
    padded: bool,
    normalize: bool,
    hist_KBE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.assign_rows_fwd` in Triton; gates in fp32.

    With ``hist_KBE`` positions are ranks in the blocks of :func:`.slots.rank_in_blocks`.
    """
    (T, K), E, device = expert_TK.shape, num_routed_KE.shape[1], expert_TK.device
    inputs = (
        checked("expert", expert_TK, (T, K), INT32, device),
        checked("position_in_expert", position_in_expert_TK, (T, K), INT32, device),
        hist_KBE,
        checked("gate", gate_TK, (T, K), FP32, device),
        checked("num_routed", num_routed_KE, (K, E), INT32, device),
    )
    num_rows = E * capacity if padded else T * K
    dest_row_TK = torch.empty((T, K), dtype=torch.int32, device=device)
    src_pair_R, weight_TK = dest_row_TK.new_empty(num_rows), gate_TK.new_empty((T, K))
    # without rows there is no program that counts
    make = dest_row_TK.new_empty if num_rows > 0 else dest_row_TK.new_zeros
    num_kept_E, end_E = make(E), make(0 if padded else E)
    outputs = (dest_row_TK, src_pair_R, weight_TK, num_kept_E, end_E)
    tile = _tile(K)
    num_token_blocks = cdiv(T, tile["BLOCK_T"])
    grid = (num_token_blocks + cdiv(num_rows, FLAT_BLOCK),)
    if grid[0] > 0:
        with device_guard(expert_TK):
            _assign_rows_fwd_kernel[grid](
                *outputs,
                *inputs,
                T,
                num_rows,
                num_token_blocks,
                0 if hist_KBE is None else hist_KBE.shape[1],
                T * K if capacity is None else capacity,
                E=E,
                TOP_K=K,
                PADDED=padded,
                NORMALIZE=normalize,
                SLOTS=SLOT_BLOCK,
                BLOCK_R=FLAT_BLOCK,
                BLOCK_E=next_power_of_2(E),
                **tile,
            )
    return outputs


def sort_pairs_fwd(
    expert_TK: Tensor,
    gate_TK: Tensor,
    num_experts: int,
    *,
    priority_T: Tensor | None,
    capacity: int | None,
    padded: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.sort_pairs_fwd` in Triton; gates in fp32."""
    if priority_T is None:  # the last kernel adds the blocks' offsets
        slot_TK, hist_KBE, num_routed_KE = rank_in_blocks(expert_TK, num_experts)
    else:
        hist_KBE = None
        slot_TK, num_routed_KE = assign_slots(expert_TK, num_experts, priority_T=priority_T)
    layout = {"capacity": capacity, "padded": padded, "normalize": normalize}
    found = assign_rows_fwd(expert_TK, slot_TK, gate_TK, num_routed_KE, hist_KBE=hist_KBE, **layout)
    return *found, num_routed_KE


def assign_rows_bwd(
    d_weight_TK: Tensor, gate_TK: Tensor, dest_row_TK: Tensor, *, normalize: bool
) -> Tensor:
    """Compute :func:`fairseq_tutel.backends.torch.assign_rows_bwd` in Triton, all in fp32."""
    (T, K), device = gate_TK.shape, gate_TK.device
    tensors = (
        checked("d_weight", d_weight_TK, (T, K), FP32, device),
        checked("gate", gate_TK, (T, K), FP32, device),
        checked("dest_row", dest_row_TK, (T, K), INT32, device),
    )
    d_gate_TK = gate_TK.new_empty((T, K))
    if T > 0:
        tile = _tile(K)
        with device_guard(gate_TK):
            _assign_rows_bwd_kernel[(cdiv(T, tile["BLOCK_T"]),)](
                d_gate_TK, *tensors, T, TOP_K=K, NORMALIZE=normalize, **tile
            )
    return d_gate_TK
