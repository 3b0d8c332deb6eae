"""Who talks to whom. The only room that imports ``torch.distributed``."""

from .agreement import (
    StepAgreement,
    StepSettings,
    any_rank,
    setting,
    sum_over_ranks,
    sync_step,
)
from .exchanges import (
    Exchange,
    LocalCopy,
    TimedExchange,
    build_exchange,
    exchange_class,
    exchange_help,
    exchange_names,
    on_new_exchange,
    register_exchange,
)
from .expert_params import (
    average_expert_grad,
    ddp_without_experts,
    expert_grad_sq_norm,
    is_expert,
    mark_expert,
    reduce_expert_grads,
    refuse_plain_ddp,
)
from .gather import gather_texts
from .groups import ExpertParallelGroups, build_groups, shared_groups
from .world import process_world

__all__ = [
    "Exchange",
    "ExpertParallelGroups",
    "LocalCopy",
    "StepAgreement",
    "StepSettings",
    "TimedExchange",
    "any_rank",
    "average_expert_grad",
    "build_exchange",
    "build_groups",
    "ddp_without_experts",
    "exchange_class",
    "exchange_help",
    "exchange_names",
    "expert_grad_sq_norm",
    "gather_texts",
    "is_expert",
    "mark_expert",
    "on_new_exchange",
    "process_world",
    "reduce_expert_grads",
    "refuse_plain_ddp",
    "register_exchange",
    "setting",
    "shared_groups",
    "sum_over_ranks",
    "sync_step",
]
