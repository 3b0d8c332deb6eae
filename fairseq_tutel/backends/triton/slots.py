"""Slots of tokens in their experts.

A slot is the number of earlier pairs with the same expert. Blocks of pairs count their experts
(histogram) and rank their pairs among themselves; a scan over the blocks turns the histograms
into offsets; slot = offset + rank. Everything is integer arithmetic in a fixed order, so the
result does not vary, and no T x E mask is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import SCAN_BLOCK_COLS, SCAN_BLOCK_ROWS, SLOT_BLOCK
from ._runtime import INT32, check_tensor, checked, device_guard
from ._sizes import cdiv, next_power_of_2

_DYNAMIC = ["num_tokens", "num_blocks"]


@triton.jit
def _load_choices(expert_ptr, order_ptr, position, mask, k, TOP_K: tl.constexpr):
    """Load the index of the pair (token, k) at each position, and its expert."""
    token = position
    if order_ptr is not None:
        token = tl.load(order_ptr + position, mask=mask, other=0)
    pair = token * TOP_K + k
    return pair, tl.load(expert_ptr + pair, mask=mask, other=-1)


@triton.jit(do_not_specialize=_DYNAMIC)
def _rank_in_block_kernel(
    rank_ptr,  # (T, K) int32 - output: pairs of the same expert earlier in the block
    hist_ptr,  # (K, B, E) int32 - output: pairs of each expert in each block
    expert_ptr,  # (T, K) int32, -1 = not routed
    order_ptr,  # (T,) int64 - token at each position, or None
    num_tokens,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B, K); a block is BLOCK successive positions of one choice.

    Example: experts [[2], [0], [2], [2]], E = 3, BLOCK = 4 -> rank [[0], [0], [1], [2]],
    hist [[[1, 0, 3]]].
    """
    block = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    position = block * BLOCK + lane
    mask = position < num_tokens
    pair, expert = _load_choices(expert_ptr, order_ptr, position, mask, k, TOP_K)
    same = expert[:, None] == expert[None, :]
    earlier = lane[None, :] < lane[:, None]
    rank = tl.sum((same & earlier).to(tl.int32), axis=1)
    tl.store(rank_ptr + pair, rank, mask=mask)
    # Pairs that are not routed go to one bin more than there are experts.
    hist = tl.histogram(tl.where(expert < 0, E, expert), BLOCK_E)
    offs_e = tl.arange(0, BLOCK_E)
    tl.store(hist_ptr + (k * num_blocks + block) * E + offs_e, hist, mask=offs_e < E)


@triton.jit(do_not_specialize=_DYNAMIC)
def _scan_blocks_kernel(
    hist_ptr,  # (K, B, E) int32 - input and output: becomes the sum over all earlier blocks
    count_ptr,  # (K, E) int32 - output: sum over the blocks of a choice
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (cdiv(E, BLOCK_E),); exclusive scan over (k, block), all blocks of choice 0 first.

    Example: hist [[[1], [2]], [[3], [4]]] -> hist [[[0], [1]], [[3], [6]]], count [[3], [7]].
    """
    offs_e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    before = tl.zeros([BLOCK_E], tl.int32)
    blocks_per_choice = num_blocks.to(tl.int64)
    offs_count = offs_e
    for k in range(TOP_K):
        first = before
        for start in range(0, num_blocks, BLOCK_B):
            offs_b = start + tl.arange(0, BLOCK_B)
            mask = (offs_b < num_blocks)[:, None] & mask_e[None, :]
            row = k * blocks_per_choice + offs_b
            offs = row[:, None] * E + offs_e[None, :]
            hist = tl.load(hist_ptr + offs, mask=mask, other=0)
            inclusive = tl.cumsum(hist, axis=0)
            tl.store(hist_ptr + offs, before[None, :] + inclusive - hist, mask=mask)
            before += tl.sum(hist, axis=0)
        tl.store(count_ptr + offs_count, before - first, mask=mask_e)
        offs_count += E


@triton.jit(do_not_specialize=_DYNAMIC)
def _add_offset_kernel(
    slot_ptr,  # (T, K) int32 - input: rank in the block; output: slot, -1 = not routed
    hist_ptr,  # (K, B, E) int32 - pairs of the expert before each block
    expert_ptr,  # (T, K) int32, -1 = not routed
    order_ptr,  # (T,) int64 - token at each position, or None
    num_tokens,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B, K) as :func:`_rank_in_block_kernel`.

    Example: rank [[0], [1]], experts [[1], [1]], hist [[[5, 7]]] -> slot [[7], [8]].
    """
    block = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64)
    position = block * BLOCK + tl.arange(0, BLOCK)
    mask = position < num_tokens
    pair, expert = _load_choices(expert_ptr, order_ptr, position, mask, k, TOP_K)
    routed = mask & (expert >= 0)
    offset = tl.load(
        hist_ptr + (k * num_blocks + block) * E + expert.to(tl.int64), mask=routed, other=0
    )
    rank = tl.load(slot_ptr + pair, mask=mask, other=0)
    tl.store(slot_ptr + pair, tl.where(routed, offset + rank, -1), mask=mask)


def rank_in_blocks(
    expert_TK: Tensor, num_experts: int, order_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank the pairs of each block of SLOT_BLOCK positions of a choice.

    Args:
        expert_TK: (T, K) int32, -1 = not routed.
        num_experts: E.
        order_T: (T,) int64, token at each position; None (default): the tokens' order.

    Returns:
        rank_TK: int32, earlier pairs of the same expert in the block.
        before_KBE: int32, pairs of each expert before each block.
        num_routed_KE: int32, pairs by choice and expert.
    """
    (T, K), E, device = expert_TK.shape, num_experts, expert_TK.device
    expert_TK = checked("expert", expert_TK, (T, K), INT32, device)
    rank_TK = torch.empty((T, K), dtype=torch.int32, device=device)
    num_blocks = cdiv(T, SLOT_BLOCK)
    hist_KBE = rank_TK.new_empty((K, num_blocks, E))
    if T == 0:
        return rank_TK, hist_KBE, rank_TK.new_zeros((K, E))
    num_routed_KE = rank_TK.new_empty((K, E))
    sizes = {"E": E, "TOP_K": K}
    block_e = next_power_of_2(E + 1)
    pairs = (rank_TK, hist_KBE, expert_TK, order_T, T, num_blocks)
    columns = {"BLOCK_B": SCAN_BLOCK_ROWS, "BLOCK_E": SCAN_BLOCK_COLS}
    scan_grid = (cdiv(E, SCAN_BLOCK_COLS),)
    with device_guard(expert_TK):
        _rank_in_block_kernel[num_blocks, K](*pairs, **sizes, BLOCK=SLOT_BLOCK, BLOCK_E=block_e)
        _scan_blocks_kernel[scan_grid](hist_KBE, num_routed_KE, num_blocks, **sizes, **columns)
    return rank_TK, hist_KBE, num_routed_KE


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.assign_slots` in Triton; torch sorts."""
    (T, K), device = expert_TK.shape, expert_TK.device
    expert_TK = checked("expert", expert_TK, (T, K), INT32, device)
    order_T = None
    if priority_T is not None:
        check_tensor("priority", priority_T, (T,), (priority_T.dtype,), device)
        order_T = priority_T.argsort(descending=True, stable=True)
    slot_TK, hist_KBE, num_routed_KE = rank_in_blocks(expert_TK, num_experts, order_T)
    if T > 0:
        pairs = (slot_TK, hist_KBE, expert_TK, order_T, T, hist_KBE.shape[1])
        with device_guard(expert_TK):
            _add_offset_kernel[hist_KBE.shape[1], K](
                *pairs, E=num_experts, TOP_K=K, BLOCK=SLOT_BLOCK
            )
    return slot_TK, num_routed_KE
