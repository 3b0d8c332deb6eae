"""Communication between ranks. The only room that imports ``torch.distributed``."""

from .agreement import (
    StepAgreement,
    StepSettings,
    any_rank,
    setting,
    sum_over_ranks,
    sync_step,
    sync_step_of_all,
)
from .exchanges import (
    Codec,
    Exchange,
    Leg,
    LocalCopy,
    TimedExchange,
    Wrapper,
    build_exchange,
    build_flows,
    chunk_edges,
    register_exchange,
)
from .expert_params import (
    copies_of,
    gather_from_experts,
    is_expert,
    mark_expert,
    max_over_replicas_,
    refuse_plain_ddp,
    sum_over_replicas_,
    sum_tensor_over_ranks_,
)
from .flows import Flow, make_flow, possible_r
from .gather import gather_integers, gather_texts, refuse_differences
from .groups import ExpertParallelGroups, build_groups, shared_groups
from .nodes import ranks_per_node
from .sharded import full_tensor, is_sharded, shard_like, sharded_grad_scaler, sharded_norm
from .slice_gather import SliceGather
from .slices import slice_dim, slice_size, take_slice, whole_shape
from .weights import gather_weights
from .world import process_world

__all__ = [
    "Codec",
    "Exchange",
    "ExpertParallelGroups",
    "Flow",
    "Leg",
    "LocalCopy",
    "SliceGather",
    "StepAgreement",
    "StepSettings",
    "TimedExchange",
    "Wrapper",
    "any_rank",
    "build_exchange",
    "build_flows",
    "build_groups",
    "chunk_edges",
    "copies_of",
    "full_tensor",
    "gather_from_experts",
    "gather_integers",
    "gather_texts",
    "gather_weights",
    "is_expert",
    "is_sharded",
    "make_flow",
    "mark_expert",
    "max_over_replicas_",
    "possible_r",
    "process_world",
    "ranks_per_node",
    "refuse_differences",
    "refuse_plain_ddp",
    "register_exchange",
    "setting",
    "shard_like",
    "sharded_grad_scaler",
    "sharded_norm",
    "shared_groups",
    "slice_dim",
    "slice_size",
    "sum_over_ranks",
    "sum_over_replicas_",
    "sum_tensor_over_ranks_",
    "sync_step",
    "sync_step_of_all",
    "take_slice",
    "whole_shape",
]
