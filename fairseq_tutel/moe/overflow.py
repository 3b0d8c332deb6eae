"""Assign the slots of experts to pairs, and re-route pairs that find their expert full.

With ``overflow_rerouting=R`` such a pair takes the token's next best expert with free slots (Switch
Transformer, arXiv 2101.03961, appendix B: "no token left behind"). In each of R rounds one such
pair of each token tries the token's next choice: K + 1, K + 2, ... A token never gets an expert
twice, and no size depends on the data.
"""

import torch

from .. import ops


def assign_positions(
    expert_TK: torch.Tensor, num_experts: int, priority: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of every pair within its expert, and int32 [K, E] pairs by choice.

    ``priority``: fp32, larger goes first: [T] of tokens, [T, K] of pairs, or None.
    """
    if priority is None or priority.dim() == 1:
        return ops.assign_slots(expert_TK, num_experts, priority_T=priority)
    pairs, priority = expert_TK.reshape(-1, 1), priority.reshape(-1)  # one choice per "token"
    position, _ = ops.assign_slots(pairs, num_experts, priority_T=priority)
    return position.view_as(expert_TK), count_pairs(expert_TK, num_experts)


def count_pairs(expert_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return int32 [K, E], pairs by choice and expert."""
    top_k, bins = expert_TK.shape[1], num_experts + 1  # the first bin for pairs not routed
    bin_TK = expert_TK.long() + 1 + bins * torch.arange(top_k, device=expert_TK.device)
    return bin_counts(bin_TK, top_k * bins).view(top_k, bins)[:, 1:].contiguous()


def bin_counts(bins: torch.Tensor, size: int) -> torch.Tensor:
    """Return int32 [size], how often each number occurs; bincount would synchronise with a GPU."""
    counts = torch.zeros(size, dtype=torch.int32, device=bins.device)
    return counts.scatter_add_(
        0, bins.flatten(), torch.ones_like(bins.flatten(), dtype=torch.int32)
    )


def reroute(
    expert_TK: torch.Tensor,
    position_TK: torch.Tensor,
    gate_TK: torch.Tensor,
    num_routed_KE: torch.Tensor,
    fallback: tuple[torch.Tensor, torch.Tensor],
    capacity: int,
    priority: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move pairs whose position is not below the capacity to experts with free slots.

    If each pair has a priority, [T, K], the fallbacks' gate values decide in each round. Return the
    first four arguments after the moves. The counts are right only if summed over K.
    """
    fallback_expert_TR, fallback_gate_TR = fallback
    num_experts = num_routed_KE.shape[1]
    tried_E = num_routed_KE.sum(0, dtype=torch.int32)
    full_TK = (expert_TK >= 0) & (position_TK >= capacity)
    for r in range(fallback_expert_TR.shape[1]):
        used_E = tried_E.clamp(max=capacity)
        wanted_T = torch.where(full_TK.any(1), fallback_expert_TR[:, r], -1)
        by = priority
        if priority is not None and priority.dim() == 2:
            by = fallback_gate_TR.detach()[:, r]
        rank_T1, num_wanted_1E = ops.assign_slots(wanted_T[:, None], num_experts, priority_T=by)
        place_T = rank_T1[:, 0] + used_E[wanted_T.clamp(min=0).long()]
        found_T = (wanted_T >= 0) & (place_T < capacity)
        first_TK = full_TK & (full_TK.cumsum(1) == 1)
        moved_TK = first_TK & found_T[:, None]
        expert_TK = torch.where(moved_TK, wanted_T[:, None], expert_TK)
        position_TK = torch.where(moved_TK, place_T[:, None], position_TK)
        gate_TK = torch.where(moved_TK, fallback_gate_TR[:, r : r + 1], gate_TK)
        full_TK = full_TK & ~moved_TK
        tried_E = used_E + num_wanted_1E[0]
    num_tried_KE = torch.zeros_like(num_routed_KE)
    num_tried_KE[0] = tried_E
    return expert_TK, position_TK, gate_TK, num_tried_KE
