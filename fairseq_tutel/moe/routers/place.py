"""Second stage of routing: a row for every choice, after rejection and by priority."""

import torch

from ..routing import RouterCall, Routing, build_routing, share_of_gates
from .select import Selection, second_by


def assign_rows(
    chosen: Selection, call: RouterCall, score_TE: torch.Tensor
) -> tuple[Routing, torch.Tensor | None]:
    """Return the routing, and which choices were rejected, bool [T, K]; None: none can be."""
    steering, weight_TK = call.steering, None
    if steering is not None and steering.weight_TK is not None:
        weight_TK = steering.weight_TK
        chosen = chosen._replace(gate_TK=weight_TK)
    config = call.config
    # Meta's rule: divide softmax values by their sum, at least epsilon
    divides = config.score_function == "softmax" and not config.null_experts
    log_gate_TE = None if divides else score_TE
    expert_TK, gate_TK, fallback = chosen.expert_TK, chosen.gate_TK, chosen.fallback
    priority = _priority(gate_TK, call)
    if config.normalize_before_dropping and config.top_k > 1 and weight_TK is None:
        gate_TK, fallback = _normalize(expert_TK, gate_TK, fallback, log_gate_TE)
    rejected_TK = None
    if second_by(call, "random"):  # unless K * gate exceeds a uniform draw
        rejected_TK = ~(config.top_k * gate_TK.detach() > torch.rand_like(gate_TK))
        rejected_TK[:, 0] = False
    if steering is not None and steering.given_TK is not None:  # after the draw: a replay draws too
        rejected_TK = steering.given_TK < -1
    if rejected_TK is not None:
        rejected_TK = rejected_TK & (expert_TK >= 0)
        expert_TK = torch.where(rejected_TK, -1, expert_TK)
    routing = build_routing(
        expert_TK,
        gate_TK,
        call,
        priority=priority,
        fallback=fallback,
        log_gate_TE=log_gate_TE,
        is_final=weight_TK is not None,
    )
    return routing, rejected_TK


def _priority(gate_TK, call) -> torch.Tensor | None:
    """Return which tokens [T], or pairs [T, K], take their slots first; None: in their order."""
    config = call.config
    if config.batch_prioritized:
        return gate_TK.detach()[:, 0]
    if config.drop_policy == "probability":
        return gate_TK.detach()
    if config.drop_policy == "random" and call.training:
        return torch.rand_like(gate_TK[:, 0])
    return None


def _normalize(expert_TK, gate_TK, fallback, log_gate_TE):
    """Divide the gate values of choices and fallbacks by the sum over the K choices."""
    if log_gate_TE is None:
        total_T1 = gate_TK.sum(1, keepdim=True).clamp(min=torch.finfo(gate_TK.dtype).eps)
        gate_TK = gate_TK / total_T1
    else:
        gate_TK, total_T1 = share_of_gates(log_gate_TE, expert_TK, expert_TK >= 0)
    if fallback is None:
        return gate_TK, None
    others_TR, gate_TR = fallback
    if log_gate_TE is None:
        return gate_TK, (others_TR, gate_TR / total_T1)
    log_TR = log_gate_TE.gather(1, others_TR.clamp(min=0).long())
    return gate_TK, (others_TR, (log_TR - total_T1).exp())
