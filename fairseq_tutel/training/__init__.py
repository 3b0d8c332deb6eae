"""What a program that trains needs from this package, whichever program it is.

A host owns the loop, the optimizer and the files; the layer owns its experts, which are spread over
the ranks and are therefore exceptions to everything that data parallelism takes for granted. Here
is all that treats them as such, for any ``nn.Module`` with
:class:`~fairseq_tutel.moe.MoELayer` s in it, built after
``torch.distributed.init_process_group``. fairseq's trainer stands on it like any
other. Every function is collective: all ranks call it, in the same order.

    prepare     ``wrap_data_parallel``, or ``prepare_data_parallel`` where something else wraps;
                ``shard_dense``; ``shard_optimizer``
    each step   ``collect_aux``, ``clip_grad_norm_``, ``grad_scaler``, ``update_load_bias``
    state       ``save_checkpoint``, ``load_checkpoint``; ``full_state_dict`` and its ``load_``;
                ``DistributedState`` for ``torch.distributed.checkpoint``
    optimizers  any; ``matrix_parameters`` for those that treat a matrix as a whole

A plain loop is in ``scripts/examples/plain_pytorch.py``.

A program of other parts uses theirs: ``reduce_expert_grads`` where gradients are reduced once per
update, ``expert_grad_sq_norm`` where it computes the dense norm itself, ``StateNames`` for the
state of an optimizer that holds copies of parameters, ``whole_optimizer_state`` and
``own_optimizer_state`` for one that is sharded, ``save_state`` and ``load_state`` where a
checkpoint is a dict of its own.
"""

from .aux_losses import AuxLosses, collect_aux, update_load_bias, update_load_biases
from .data_parallel import (
    expert_parameters,
    leave_experts_out,
    prepare_data_parallel,
    wrap_data_parallel,
)
from .gradients import clip_grad_norm_, expert_grad_sq_norm, grad_scaler, reduce_expert_grads
from .matrices import ExpertMatrix, matrix_parameters
from .memory import explain_out_of_memory
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
    "reduce_expert_grads",
    "save_checkpoint",
    "save_state",
    "shard_dense",
    "shard_optimizer",
    "update_load_bias",
    "update_load_biases",
    "whole_optimizer_state",
    "wrap_data_parallel",
]
