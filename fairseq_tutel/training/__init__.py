"""Data parallelism, clipping and checkpoints for any PyTorch loop with experts on several ranks.

A host is the program that trains: it owns the loop, the optimizer and the files. Experts are spread
over its ranks, so wrappers, gradient norms and state dicts must treat them apart. The functions
below do it for any ``nn.Module``, with :class:`~fairseq_tutel.moe.MoELayer` s in it or without.
Build the model after ``torch.distributed.init_process_group``. All ranks call a function, in the
same order, unless its docstring says otherwise.

    prepare     ``wrap_data_parallel``; ``prepare_data_parallel`` if the host wraps;
                ``shard_dense``; ``shard_optimizer``
    each step   ``collect_aux``, ``clip_grad_norm_``, ``grad_scaler``, ``update_load_bias``
    routing     ``record_choices``, ``replay_choices``
    state       ``save_checkpoint``, ``load_checkpoint``; ``full_state_dict`` and its ``load_``;
                ``DistributedState`` for ``torch.distributed.checkpoint``
    optimizers  any; ``matrix_parameters`` for optimizers that step a matrix as a whole

``scripts/examples/plain_pytorch.py`` is a complete loop.

Hosts with own reductions or files use the parts: ``reduce_expert_grads`` reduces once per update;
``expert_grad_sq_norm`` is the experts' part of a gradient norm; ``StateNames`` names the state of
an optimizer that steps copies of parameters; ``whole_optimizer_state`` and ``own_optimizer_state``
serve a sharded optimizer; ``save_state`` and ``load_state`` take a dict of the host's own.
"""

from .aux_losses import AuxLosses, collect_aux, update_load_bias, update_load_biases
from .choices import record_choices, replay_choices
from .data_parallel import (
    expert_parameters,
    leave_experts_out,
    prepare_data_parallel,
    wrap_data_parallel,
)
from .gradients import clip_grad_norm_, expert_grad_sq_norm, grad_scaler, reduce_expert_grads
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
from .state.sharded_optimizer import (
    own_optimizer_state,
    shard_optimizer,
    whole_optimizer_state,
)
from .state.transforms import SAVE_TRANSFORMS, SaveTransform

__all__ = [
    "AuxLosses",
    "DistributedState",
    "ExpertMatrix",
    "SAVE_TRANSFORMS",
    "SaveTransform",
    "StateNames",
    "all_ranks",
    "checkpoint_exists",
    "clip_grad_norm_",
    "collect_aux",
    "expert_grad_sq_norm",
    "expert_parameters",
    "explain_out_of_memory",
    "full_state_dict",
    "grad_scaler",
    "leave_experts_out",
    "load_checkpoint",
    "load_full_state_dict",
    "load_state",
    "load_weights",
    "matrix_parameters",
    "own_optimizer_state",
    "prepare_data_parallel",
    "record_choices",
    "reduce_expert_grads",
    "replay_choices",
    "save_checkpoint",
    "save_state",
    "shard_dense",
    "shard_optimizer",
    "update_load_bias",
    "update_load_biases",
    "whole_optimizer_state",
    "wrap_data_parallel",
]
