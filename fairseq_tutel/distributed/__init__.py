"""Communication between ranks."""

from .agreement import (
    PassState,
    StepAgreement,
    StepSettings,
    any_rank,
    sum_over_ranks,
    sync_stacks,
    sync_stacks_of_all,
    sync_step,
    sync_step_and_word,
)
from .exchanges import (
    Direction,
    Exchange,
    ExchangeAlgorithm,
    ExchangeRecord,
    build_exchange,
    register_exchange,
)
from .placement.copies import experts_of_ffn
from .placement.expert_parallelism import (
    ExpertParallelism,
    expert_parallelism,
    gather_weights,
    possible_r,
)
from .placement.expert_params import (
    broadcast_over_replicas_,
    copies_of,
    gather_from_experts,
    is_expert,
    mark_expert,
    max_over_replicas_,
    sum_over_replicas_,
    sum_tensor_over_ranks_,
)
from .placement.groups import ExpertParallelGroups, build_groups
from .placement.held_experts import HELD, held_experts, pop_held_experts, without_held_experts
from .placement.owners import as_bytes, broadcast_from_owners_, send_to_first, share_out
from .placement.sharded import (
    full_tensor,
    is_sharded,
    local_part,
    shard_like,
    shard_modules,
    sharded_grad_scaler,
    sharded_norm,
    slice_as_dtensor,
)
from .placement.slices import (
    SliceGather,
    declare_slices,
    slice_dim,
    slice_size,
    take_slice,
    whole_shape,
)
from .placement.wrappers import expect_reduction, note_reduction, refuse_plain_wrapper
from .world import (
    gather_integers,
    gather_objects,
    gather_on_first,
    gather_texts,
    process_world,
    ranks_per_node,
    refuse_differences,
)

__all__ = [
    "Direction",
    "Exchange",
    "ExchangeAlgorithm",
    "ExchangeRecord",
    "ExpertParallelGroups",
    "StepAgreement",
    "StepSettings",
    "build_exchange",
    "build_groups",
    "gather_objects",
    "gather_texts",
    "is_expert",
    "possible_r",
    "process_world",
    "register_exchange",
    "sync_step",
]
