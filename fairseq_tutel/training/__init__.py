"""Data parallelism, clipping and checkpoints for any PyTorch loop with experts on several ranks.

Experts are spread over the ranks, so wrappers, gradient norms and state dicts must treat them
apart. Build the model after ``torch.distributed.init_process_group``. All ranks call a function, in
the same order, unless its docstring says otherwise. README.md in this folder lists the functions by
purpose; ``scripts/examples/plain_pytorch.py`` is a complete loop.
"""

from .aux_losses import AuxLosses, collect_aux, end_update, update_load_bias
from .choices import choices_of_sequences, record_choices, replay_choices
from .data_parallel import (
    expert_parameters,
    leave_experts_out,
    prepare_data_parallel,
    wrap_data_parallel,
)
from .gradients import clip_grad_norm_, expert_grad_sq_norm, grad_scaler, reduce_expert_grads
from .lora import add_lora, load_lora, merge_lora, save_lora
from .matrices import ExpertMatrix, matrix_parameters
from .out_of_memory import explain_out_of_memory
from .shard_dense import shard_dense
from .state import all_ranks
from .state.distributed_state import DistributedState
from .state.full_state import full_state_dict, load_full_state_dict
from .state.optimizer_state import StateNames
from .state.save_load import (
    checkpoint_exists,
    load_checkpoint,
    load_state,
    load_weights,
    save_checkpoint,
    save_state,
)
from .state.sharded_optimizer import own_optimizer_state, shard_optimizer, whole_optimizer_state
from .state.transforms import SAVE_TRANSFORMS, SaveTransform

__all__ = [
    "AuxLosses",
    "DistributedState",
    "ExpertMatrix",
    "SAVE_TRANSFORMS",
    "SaveTransform",
    "StateNames",
    "add_lora",
    "all_ranks",
    "checkpoint_exists",
    "choices_of_sequences",
    "clip_grad_norm_",
    "collect_aux",
    "end_update",
    "expert_grad_sq_norm",
    "expert_parameters",
    "explain_out_of_memory",
    "full_state_dict",
    "grad_scaler",
    "leave_experts_out",
    "load_checkpoint",
    "load_full_state_dict",
    "load_lora",
    "load_state",
    "load_weights",
    "matrix_parameters",
    "merge_lora",
    "own_optimizer_state",
    "prepare_data_parallel",
    "record_choices",
    "reduce_expert_grads",
    "replay_choices",
    "save_checkpoint",
    "save_lora",
    "save_state",
    "shard_dense",
    "shard_optimizer",
    "update_load_bias",
    "whole_optimizer_state",
    "wrap_data_parallel",
]
