"""Slots of tokens in their experts, in plain torch; on a CPU in numpy.

That sorts numbers of 16 bits by their digits, and begins an operation in less time than torch does.
X below: bins of pairs, the first for those that are not routed, then one for each expert.
"""

import numpy as np
import torch
from torch import Tensor


def _slots_on_cpu(expert_KT: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    number_KT = np.ascontiguousarray(expert_KT.numpy())
    choices, bins = len(number_KT), num_experts + 1
    bin_KT = number_KT + np.arange(1, choices * bins, bins)[:, None]
    count_KX = np.bincount(bin_KT.ravel(), minlength=choices * bins).reshape(choices, bins)
    total_X = count_KX.sum(0)
    order_N = number_KT.ravel().astype(np.min_scalar_type(-bins)).argsort(kind="stable")
    slot_N = np.empty(order_N.size, np.int32)
    begin_N = (total_X.cumsum() - total_X).astype(np.int32).repeat(total_X)
    slot_N[order_N] = np.arange(order_N.size, dtype=np.int32) - begin_N
    slot_N[order_N[: total_X[0]]] = -1
    num_routed_KE = count_KX[:, 1:].astype(np.int32)
    return torch.from_numpy(slot_N).view(expert_KT.shape), torch.from_numpy(num_routed_KE)


def _slots(expert_KT: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
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
    return slot_N.view(expert_KT.shape), count_KX[:, 1:].to(torch.int32)


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in :func:`fairseq_tutel.ops.assign_slots`."""
    expert_KT = expert_TK.t()
    if priority_T is not None:
        order_T = priority_T.argsort(descending=True, stable=True)
        expert_KT = expert_KT[:, order_T]
    slots = _slots_on_cpu if expert_TK.device.type == "cpu" else _slots
    slot_KT, num_routed_KE = slots(expert_KT, num_experts)
    if priority_T is not None:
        in_order_KT = torch.empty_like(slot_KT)
        in_order_KT[:, order_T] = slot_KT
        slot_KT = in_order_KT
    return slot_KT.t().contiguous(), num_routed_KE
