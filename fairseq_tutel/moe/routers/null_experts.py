"""Null experts: choices that compute nothing (``null_experts``)."""

import torch

from ..overflow import count_pairs
from ..routing import RouterCall
from .select import Selection


def without_null_experts(
    chosen: Selection, call: RouterCall
) -> tuple[Selection, torch.Tensor | None]:
    """Return the choices of real experts, and int32 pairs by choice and null expert, or None."""
    num_experts, num_null = call.config.num_experts, call.config.null_experts
    if not num_null:
        return chosen, None
    expert_TK, fallback = chosen.expert_TK, chosen.fallback
    if fallback is not None:
        fallback = torch.where(fallback[0] < num_experts, fallback[0], -1), fallback[1]
    of_experts = torch.where(expert_TK < num_experts, expert_TK, -1)
    num_null_KN = count_pairs((expert_TK - num_experts).clamp(min=-1), num_null)
    return chosen._replace(expert_TK=of_experts, fallback=fallback), num_null_KN
