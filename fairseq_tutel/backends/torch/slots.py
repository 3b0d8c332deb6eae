"""Slots of tokens in their experts, by one stable sort."""

import torch
from torch import Tensor


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the slot of each pair and the pairs per choice and expert.

    Arguments and results are those of :func:`fairseq_tutel.ops.assign_slots`. X below counts bins
    of pairs: the first for pairs that are not routed, then one per expert.
    """
    expert_KT = expert_TK.t()
    if priority_T is not None:
        order_T = priority_T.argsort(descending=True, stable=True)
        expert_KT = expert_KT[:, order_T]
    choices, bins = len(expert_KT), num_experts + 1
    first_bin_K1 = torch.arange(1, choices * bins, bins, device=expert_KT.device)[:, None]
    bin_N = (expert_KT + first_bin_K1).reshape(-1)
    count_KX = torch.bincount(bin_N, minlength=choices * bins).view(choices, bins)
    sorted_N, order_N = expert_KT.reshape(-1).sort(stable=True)
    total_X = count_KX.sum(0)
    begin_X = total_X.cumsum(0) - total_X
    rank_N = torch.arange(sorted_N.numel(), device=sorted_N.device) - begin_X[sorted_N.long() + 1]
    slot_N = torch.empty_like(sorted_N)
    slot_N[order_N] = rank_N.to(torch.int32).masked_fill_(sorted_N < 0, -1)
    slot_KT = slot_N.view(expert_KT.shape)
    if priority_T is not None:
        in_order_KT = torch.empty_like(slot_KT)
        in_order_KT[:, order_T] = slot_KT
        slot_KT = in_order_KT
    return slot_KT.t().contiguous(), count_KX[:, 1:].to(torch.int32)
