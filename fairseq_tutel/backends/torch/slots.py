"""Slots of tokens in their experts, in plain torch."""

import torch
from torch import Tensor

from ._threads import small_on_one_thread

# Up to this many one-hot entries, a cumulative sum beats a sort on CPU.
_MAX_ONE_HOT = 1 << 16


def _rank_by_cumsum(expert_N: Tensor, num_experts: int) -> Tensor:
    one_hot_EN = expert_N == torch.arange(num_experts, device=expert_N.device)[:, None]
    rank_EN = one_hot_EN.cumsum(dim=1, dtype=torch.int32)
    slot_N = rank_EN.gather(0, expert_N.clamp(min=0).long()[None])[0] - 1
    return slot_N.masked_fill_(expert_N < 0, -1)


def _rank_by_sort(expert_N: Tensor, count_E: Tensor) -> Tensor:
    sorted_N, order_N = expert_N.sort(stable=True)
    # Skipped pairs (-1) sort to the front; the first expert starts behind them.
    start_E = expert_N.numel() - count_E.sum() + count_E.cumsum(0) - count_E
    position_N = torch.arange(expert_N.numel(), device=expert_N.device)
    rank_N = position_N - start_E[sorted_N.clamp(min=0).long()]
    slot_N = torch.empty_like(expert_N)
    slot_N[order_N] = rank_N.to(torch.int32).masked_fill_(sorted_N < 0, -1)
    return slot_N


@small_on_one_thread
def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Position of every (token, choice) within its expert, first choices before second ones.

    Args:
        expert_TK: (T, K) int32, -1 = not routed.
        num_experts: E.
        priority_T: (T,) float; tokens of higher priority come first, ties in token order.

    Returns:
        position_in_expert_TK (T, K) int32, -1 where not routed; num_routed_KE (K, E) int32, pairs
        per choice.
    """
    T, K = expert_TK.shape
    expert_KT = expert_TK.t()
    if priority_T is not None:
        order_T = priority_T.argsort(descending=True, stable=True)
        expert_KT = expert_KT[:, order_T]
    expert_N = expert_KT.reshape(-1)
    choice_N = torch.arange(K, device=expert_N.device).repeat_interleave(T)
    # Bin 0 of each choice collects the pairs that are not routed.
    bin_N = choice_N * (num_experts + 1) + expert_N + 1
    num_routed_KE = torch.bincount(bin_N, minlength=K * (num_experts + 1))
    num_routed_KE = num_routed_KE.view(K, num_experts + 1)[:, 1:]
    if expert_N.numel() * num_experts <= _MAX_ONE_HOT:
        slot_N = _rank_by_cumsum(expert_N, num_experts)
    else:
        slot_N = _rank_by_sort(expert_N, num_routed_KE.sum(dim=0))
    slot_KT = slot_N.view(K, T)
    if priority_T is not None:
        in_order_KT = torch.empty_like(slot_KT)
        in_order_KT[:, order_T] = slot_KT
        slot_KT = in_order_KT
    return slot_KT.t().contiguous(), num_routed_KE.to(torch.int32)
