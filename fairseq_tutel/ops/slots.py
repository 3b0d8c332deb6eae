"""Operator of the slots of tokens in their experts."""

from typing import Optional

import torch
from torch import Tensor

from ._operator import check_indices, check_shape, operator
from .backend import implementation


def _fake_slots(expert, num_experts, priority):
    position_in_expert_TK = torch.empty_like(expert, memory_format=torch.contiguous_format)
    return position_in_expert_TK, expert.new_empty((expert.shape[1], num_experts))


@operator("assign_slots", _fake_slots)
def _assign_slots(
    expert: Tensor, num_experts: int, priority: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    return implementation("assign_slots", expert)(expert, num_experts, priority_T=priority)


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the position of each (token, choice) pair within its expert; deterministic.

    All first choices are counted before all second ones and so on, each in token order or, with
    priorities (float), by descending priority (ties in token order). In ``expert_TK``, int32, -1 is
    not routed.

    Returns:
        position_in_expert_TK: (T, K) int32, -1 where not routed.
        num_routed_KE: (K, E) int32, pairs per choice and expert.
    """
    check_indices("expert", expert_TK, "tokens", "top_k")
    check_shape("priority", priority_T, expert_TK.shape[:1])
    priority_T = None if priority_T is None else priority_T.detach()
    return _assign_slots(expert_TK, num_experts, priority_T)
