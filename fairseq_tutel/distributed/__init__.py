"""Who talks to whom. The only room that imports ``torch.distributed``."""

from .all_to_all import all_to_all, all_to_all_uneven, exchange_counts
from .expert_params import (
    average_expert_grad,
    ddp_without_experts,
    expert_grad_sq_norm,
    is_expert,
    mark_expert,
    reduce_expert_grads,
    refuse_plain_ddp,
)
from .groups import ExpertParallelGroups, build_groups, process_world, shared_groups
from .handshake import StepAgreement, agree_step, any_rank, gather_texts, sum_over_ranks

__all__ = [
    "ExpertParallelGroups",
    "StepAgreement",
    "agree_step",
    "all_to_all",
    "all_to_all_uneven",
    "any_rank",
    "average_expert_grad",
    "build_groups",
    "ddp_without_experts",
    "exchange_counts",
    "expert_grad_sq_norm",
    "gather_texts",
    "is_expert",
    "mark_expert",
    "process_world",
    "reduce_expert_grads",
    "refuse_plain_ddp",
    "shared_groups",
    "sum_over_ranks",
]
