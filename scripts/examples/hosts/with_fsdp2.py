"""torch's fully_shard (FSDP2) around a model with experts; the lines that they need are marked.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_fsdp2.py run/checkpoint_last.pt

Refused: fully_shard without ignored_params, torch.nn.utils.clip_grad_norm_, and
torch.distributed.checkpoint of model.state_dict() (it takes training.DistributedState).
"""

import functools

import torch
import toy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training


def train(build, batches, steps, path, scaler=None, dtype=None):
    """Up to ``steps`` steps; ``scaler``: fairseq_tutel.training.grad_scaler(), for fp16."""
    model = build()  # <- after init_process_group
    again = functools.partial(checkpoint, model.block.forward, use_reentrant=False)
    model.block.forward = again  # computed again in the backward pass, its aux loss counts once
    if torch.distributed.is_initialized():
        training.prepare_data_parallel(model)  # <- before fully_shard
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        experts = set(training.expert_parameters(model))  # <- each has one rank already
        for module in (model.block, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=experts)  # <-
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.RATE)
    first = 0
    if training.checkpoint_exists(path):
        first = training.load_checkpoint(path, model, optimizer)["step"]  # <- on any ranks

    for step in range(first, steps):
        micro_batches = batches(step)
        for number, x in enumerate(micro_batches, 1):
            if torch.distributed.is_initialized():
                model.set_requires_gradient_sync(number == len(micro_batches))
            with training.collect_aux(model) as aux:  # <- the layers' balance losses
                loss = toy.task_loss(model(x), x)
            loss = (loss + toy.AUX_WEIGHT * aux.loss) / len(micro_batches)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        training.clip_grad_norm_(model, toy.MAX_NORM)  # <- over shards and all ranks' experts
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        optimizer.zero_grad()
    training.save_checkpoint(path, model, optimizer, {"step": steps})  # <- experts of all ranks
    return model


if __name__ == "__main__":
    toy.main(train)
