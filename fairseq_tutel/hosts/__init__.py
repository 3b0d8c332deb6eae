"""What a program that trains needs from this package, whichever program it is.

A host owns the loop, the optimizer and the files; the layer owns its experts, which are spread over
the ranks and are therefore exceptions to everything that data parallelism takes for granted. Here
is all that treats them as such, for any ``nn.Module`` with
:class:`~fairseq_tutel.moe.MoELayer` s in it, built after
``torch.distributed.init_process_group``. fairseq's trainer (:mod:`.fairseq`) stands on it like any
other. Every function is collective: all ranks call it, in the same order.

Data parallelism
    ``wrap_data_parallel(model)``: torch's DistributedDataParallel, which leaves experts alone.
    ``prepare_data_parallel(model)``: the same without wrapping, for hosts that wrap by themselves
    (Accelerate, HF Trainer, Lightning, ``fully_shard(model, ignored_params=...)``).
    ``expert_parameters(model)``: this rank's experts, for ``ignored_params``.

Each step
    ``collect_aux(model)``: the aux losses of a forward pass whose model does not pass them on.
    ``clip_grad_norm_(model, max_norm)``: one norm over dense parameters and all experts.
    ``grad_scaler()``: a GradScaler whose ranks skip a step together.
    ``update_load_bias(model, [aux, ...])``: after a step, of layers with a ``load_bias``.

    ``ExchangeTuner(layers)``: chooses how tokens travel, by what the steps themselves take.

State
    ``save_checkpoint(path, model, optimizer, extra)`` and ``load_checkpoint(path, model,
    optimizer)``: sets of files (:mod:`fairseq_tutel.checkpoint`) that any number of ranks resumes.
    ``full_state_dict(model)`` and ``load_full_state_dict(model, state)``: all experts in one dict.

A plain loop::

    model = MyModel()                                   # has MoELayers
    net = hosts.wrap_data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters())   # experts too
    for batch in batches:
        with hosts.collect_aux(model) as aux:
            loss = task_loss(net(batch))
        (loss + 0.01 * aux.loss).backward()
        hosts.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    hosts.save_checkpoint("run/checkpoint_last.pt", model, optimizer, {"step": step})

A host of other parts uses theirs: ``reduce_expert_grads`` where gradients are reduced once per
update, ``expert_grad_sq_norm`` where it computes the dense norm itself, ``StateNames`` for the
state of an optimizer that holds copies of parameters, ``save_state`` and ``load_state`` where a
checkpoint is a dict of its own.
"""

from .aux_losses import AuxLosses, collect_aux
from .checkpoint import (
    check_num_experts,
    checkpoint_exists,
    fitting,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
)
from .data_parallel import leave_experts_out, prepare_data_parallel, wrap_data_parallel
from .exchange_tuner import ExchangeTuner, describe_tuning
from .full_state import full_state_dict, load_full_state_dict
from .gradients import clip_grad_norm_, expert_grad_sq_norm, grad_scaler, reduce_expert_grads
from .load_bias import update_load_bias, update_load_biases
from .model import expert_parameters, expert_placement, moe_layers, unwrap
from .optimizer_state import StateNames

__all__ = [
    "AuxLosses",
    "ExchangeTuner",
    "StateNames",
    "check_num_experts",
    "checkpoint_exists",
    "clip_grad_norm_",
    "collect_aux",
    "describe_tuning",
    "expert_grad_sq_norm",
    "expert_parameters",
    "expert_placement",
    "fitting",
    "full_state_dict",
    "grad_scaler",
    "leave_experts_out",
    "load_checkpoint",
    "load_full_state_dict",
    "load_state",
    "moe_layers",
    "prepare_data_parallel",
    "reduce_expert_grads",
    "save_checkpoint",
    "save_state",
    "unwrap",
    "update_load_bias",
    "update_load_biases",
    "wrap_data_parallel",
]
