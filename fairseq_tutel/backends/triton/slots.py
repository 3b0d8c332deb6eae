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
from ._runtime import check_tensor, device_guard

_DYNAMIC = ["num_tokens", "num_blocks"]


@triton.jit(do_not_specialize=_DYNAMIC)
def _rank_in_block_kernel(
    rank_ptr,  # (T, K) int32 - output: pairs of the same expert earlier in the block
    hist_ptr,  # (K, B, E) int32 - output: pairs of each expert in each block
    expert_ptr,  # (T, K) int32, -1 = not routed
    order_ptr,  # (T,) int64 - token at each position; HAS_ORDER
    num_tokens,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_ORDER: tl.constexpr,
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
    token = position
    if HAS_ORDER:
        token = tl.load(order_ptr + position, mask=mask, other=0)
    expert = tl.load(expert_ptr + token * TOP_K + k, mask=mask, other=-1)
    same = expert[:, None] == expert[None, :]
    earlier = lane[None, :] < lane[:, None]
    rank = tl.sum((same & earlier).to(tl.int32), axis=1)
    tl.store(rank_ptr + token * TOP_K + k, rank, mask=mask)
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
    order_ptr,  # (T,) int64 - token at each position; HAS_ORDER
    num_tokens,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B, K) as :func:`_rank_in_block_kernel`.

    Example: rank [[0], [1]], experts [[1], [1]], hist [[[5, 7]]] -> slot [[7], [8]].
    """
    block = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64)
    position = block * BLOCK + tl.arange(0, BLOCK)
    mask = position < num_tokens
    token = position
    if HAS_ORDER:
        token = tl.load(order_ptr + position, mask=mask, other=0)
    expert = tl.load(expert_ptr + token * TOP_K + k, mask=mask, other=-1)
    routed = mask & (expert >= 0)
    offset = tl.load(
        hist_ptr + (k * num_blocks + block) * E + expert.to(tl.int64), mask=routed, other=0
    )
    rank = tl.load(slot_ptr + token * TOP_K + k, mask=mask, other=0)
    tl.store(slot_ptr + token * TOP_K + k, tl.where(routed, offset + rank, -1), mask=mask)


def scan_blocks(hist_KBE: Tensor) -> Tensor:
    """Turns the histograms into offsets in place and returns num_routed_KE."""
    K, B, E = hist_KBE.shape
    num_routed_KE = hist_KBE.new_empty((K, E))
    _scan_blocks_kernel[(triton.cdiv(E, SCAN_BLOCK_COLS),)](
        hist_KBE, num_routed_KE, B, E=E, TOP_K=K, BLOCK_B=SCAN_BLOCK_ROWS, BLOCK_E=SCAN_BLOCK_COLS
    )
    return num_routed_KE


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.assign_slots` in Triton; torch sorts the priorities.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    T, K = expert_TK.shape
    device = expert_TK.device
    check_tensor("expert", expert_TK, (T, K), (torch.int32,), device)
    if priority_T is not None:
        check_tensor("priority", priority_T, (T,), (priority_T.dtype,), device)
    position_in_expert_TK = torch.empty((T, K), dtype=torch.int32, device=device)
    if T == 0:
        return position_in_expert_TK, torch.zeros(
            (K, num_experts), dtype=torch.int32, device=device
        )
    expert_TK = expert_TK.contiguous()
    order_T = None
    if priority_T is not None:
        order_T = priority_T.argsort(descending=True, stable=True)
    num_blocks = triton.cdiv(T, SLOT_BLOCK)
    hist_KBE = torch.empty((K, num_blocks, num_experts), dtype=torch.int32, device=device)
    with device_guard(expert_TK):
        _rank_in_block_kernel[(num_blocks, K)](
            position_in_expert_TK,
            hist_KBE,
            expert_TK,
            order_T,
            T,
            num_blocks,
            E=num_experts,
            TOP_K=K,
            HAS_ORDER=order_T is not None,
            BLOCK=SLOT_BLOCK,
            BLOCK_E=triton.next_power_of_2(num_experts + 1),
        )
        num_routed_KE = scan_blocks(hist_KBE)
        _add_offset_kernel[(num_blocks, K)](
            position_in_expert_TK,
            hist_KBE,
            expert_TK,
            order_T,
            T,
            num_blocks,
            E=num_experts,
            TOP_K=K,
            HAS_ORDER=order_T is not None,
            BLOCK=SLOT_BLOCK,
        )
    return position_in_expert_TK, num_routed_KE
