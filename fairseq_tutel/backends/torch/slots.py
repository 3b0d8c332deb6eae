"""Slots of tokens in their experts; on a CPU in numpy, which also finds the rows that follow.

It sorts numbers of 16 bits by their digits, and begins an operation in less time than torch does.
X below: bins of pairs, the first for those that are not routed, then one for each expert.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class _Sorted(NamedTuple):
    """The routed pairs by expert; those of an expert in the order of their slots."""

    pair_N: np.ndarray  # t * K + k
    num_E: np.ndarray
    num_KE: np.ndarray  # int32, by choice

    def from_(self, first_E: np.ndarray) -> np.ndarray:
        """(N,) numbers of the pairs, those of an expert from its first one on."""
        begin_E = self.num_E.cumsum() - self.num_E
        return np.arange(len(self.pair_N)) + (first_E - begin_E).repeat(self.num_E)


def _sorted(expert_TK: Tensor, num_experts: int, priority_T: Tensor | None) -> _Sorted:
    number_TK = expert_TK.numpy()
    pair_TK = np.arange(number_TK.size).reshape(number_TK.shape)
    if priority_T is not None:
        order_T = priority_T.argsort(descending=True, stable=True).numpy()
        number_TK, pair_TK = number_TK[order_T], pair_TK[order_T]
    choices, bins = number_TK.shape[1], num_experts + 1
    bin_TK = number_TK + np.arange(1, choices * bins, bins)
    num_KX = np.bincount(bin_TK.ravel(), minlength=choices * bins).reshape(choices, bins)
    num_X = num_KX.sum(0)
    order_N = number_TK.T.ravel().astype(np.min_scalar_type(-bins)).argsort(kind="stable")
    pair_N = pair_TK.T.ravel()[order_N[num_X[0] :]]
    return _Sorted(pair_N, num_X[1:], num_KX[:, 1:].astype(np.int32))


def _numbered(size: int, at: np.ndarray, numbers: np.ndarray) -> Tensor:
    """(size,) int32: the numbers at these places, -1 elsewhere."""
    found = np.empty(size, np.int32)
    found.fill(-1)
    found[at] = numbers
    return torch.from_numpy(found)


def rows_on_cpu(
    expert_TK: Tensor,
    num_experts: int,
    priority_T: Tensor | None,
    *,
    capacity: int | None,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dest_row_TK``, ``src_pair_R``, ``num_kept_E`` and ``num_routed_KE`` of
    :func:`fairseq_tutel.ops.assign_rows`.
    """
    pair_N, num_E, num_KE = pairs = _sorted(expert_TK, num_experts, priority_T)
    kept_E = num_E
    if capacity is None:
        row_N = np.arange(len(pair_N))
    else:
        kept_E = num_E.clip(max=capacity)
        first_E = np.arange(num_experts) * capacity if padded else kept_E.cumsum() - kept_E
        row_N = pairs.from_(first_E)
        kept_N = row_N < (first_E + kept_E).repeat(num_E)
        pair_N, row_N = pair_N[kept_N], row_N[kept_N]
    num_rows = num_experts * capacity if padded else expert_TK.numel()
    return (
        _numbered(expert_TK.numel(), pair_N, row_N).view(expert_TK.shape),
        _numbered(num_rows, row_N, pair_N),
        torch.from_numpy(kept_E.astype(np.int32)),
        torch.from_numpy(num_KE),
    )


def _slots_on_cpu(
    expert_TK: Tensor, num_experts: int, priority_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    pairs = _sorted(expert_TK, num_experts, priority_T)
    slot_N = pairs.from_(np.zeros_like(pairs.num_E))
    slot_TK = _numbered(expert_TK.numel(), pairs.pair_N, slot_N).view(expert_TK.shape)
    return slot_TK, torch.from_numpy(pairs.num_KE)


def _slots(expert_TK: Tensor, num_experts: int, priority_T: Tensor | None) -> tuple[Tensor, Tensor]:
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


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in :func:`fairseq_tutel.ops.assign_slots`."""
    slots = _slots_on_cpu if expert_TK.device.type == "cpu" else _slots
    return slots(expert_TK, num_experts, priority_T)
