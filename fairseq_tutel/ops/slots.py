"""Operator of the slots of tokens in their experts."""

from typing import Optional

import torch
from torch import Tensor

from .backend import implementation


@torch.library.custom_op("fairseq_tutel::assign_slots", mutates_args=())
def _assign_slots(
    expert: Tensor, num_experts: int, priority: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    assign = implementation("assign_slots", expert)
    return assign(expert, num_experts, priority_T=priority)


@_assign_slots.register_fake
def _(expert, num_experts, priority):
    position_in_expert_TK = torch.empty_like(expert, memory_format=torch.contiguous_format)
    return position_in_expert_TK, expert.new_empty((expert.shape[1], num_experts))


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Position of each (token, choice) within its expert; deterministic.

    All first choices are counted before all second ones and so on, each in token order or, with
    priorities, by descending priority (ties in token order).

    Args:
        expert_TK: (T, K) int32, -1 = not routed.
        num_experts: E.
        priority_T: (T,) float, or None.

    Returns:
        position_in_expert_TK: (T, K) int32, -1 where not routed.
        num_routed_KE: (K, E) int32, pairs per choice and expert.

    Raises:
        ValueError: wrong shape or dtype.
    """
    if expert_TK.dim() != 2 or expert_TK.dtype != torch.int32:
        raise ValueError(
            f"expert must be (tokens, top_k) int32, got {tuple(expert_TK.shape)} {expert_TK.dtype}"
        )
    if priority_T is not None:
        if priority_T.shape != expert_TK.shape[:1]:
            raise ValueError(f"priority {tuple(priority_T.shape)} must be ({expert_TK.shape[0]},)")
        priority_T = priority_T.detach()
    return _assign_slots(expert_TK, num_experts, priority_T)
