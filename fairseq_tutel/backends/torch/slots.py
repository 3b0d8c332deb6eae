"""Slots of tokens in their experts, in plain torch."""

import torch
from torch import Tensor


def _rank(expert_N: Tensor, count_E: Tensor) -> Tensor:
    """How many of the same expert come before each entry, -1 for entries of -1."""
    sorted_N, order_N = expert_N.sort(stable=True)
    # Skipped pairs (-1) sort to the front; the first expert starts behind them.
    start_E = expert_N.numel() - count_E.sum() + count_E.cumsum(0) - count_E
    position_N = torch.arange(expert_N.numel(), device=expert_N.device)
    rank_N = position_N - start_E[sorted_N.clamp(min=0).long()]
    slot_N = torch.empty_like(expert_N)
    slot_N[order_N] = rank_N.to(torch.int32).masked_fill_(sorted_N < 0, -1)
    return slot_N


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in :func:`fairseq_tutel.ops.assign_slots`."""
    T, K = expert_TK.shape
    expert_KT = expert_TK.t()
    if priority_T is not None:
        order_T = priority_T.argsort(descending=True, stable=True)
        expert_KT = expert_KT[:, order_T]
    expert_N = expert_KT.reshape(-1)
    # Bin 0 of each choice collects the pairs that are not routed.
    first_bin_K1 = torch.arange(1, K * (num_experts + 1), num_experts + 1, device=expert_N.device)
    bin_KT = expert_KT + first_bin_K1[:, None]
    num_routed_KE = torch.bincount(bin_KT.reshape(-1), minlength=K * (num_experts + 1))
    num_routed_KE = num_routed_KE.view(K, num_experts + 1)[:, 1:]
    slot_KT = _rank(expert_N, num_routed_KE.sum(dim=0)).view(K, T)
    if priority_T is not None:
        in_order_KT = torch.empty_like(slot_KT)
        in_order_KT[:, order_T] = slot_KT
        slot_KT = in_order_KT
    return slot_KT.t().contiguous(), num_routed_KE.to(torch.int32)
