"""Hugging Face's Accelerate around a model with experts; the lines that they need are marked.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_accelerate.py run/checkpoint_last.pt

Refused: accelerator.clip_grad_norm_ (each rank would clip by its own experts), save_state and
save_model of the accelerator (rank 0 would save its own experts only).
"""

import torch
import toy
from accelerate import Accelerator

from fairseq_tutel import training


def train(build, batches, steps, path, scaler=None):
    """Up to ``steps`` steps, from the checkpoint if there is one.

    ``scaler``: fairseq_tutel.training.grad_scaler(), for Accelerator(mixed_precision="fp16").
    """
    cpu = not torch.cuda.is_available()  # else accelerate leaves CPU ranks unconnected
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=toy.ACCUMULATE)
    model = build()  # <- after the Accelerator, which connects the ranks
    training.prepare_data_parallel(model)  # <- before accelerator.prepare
    if scaler is not None:
        accelerator.scaler = scaler  # <- an overflow on one rank: all skip the step
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.RATE)
    net, optimizer = accelerator.prepare(model, optimizer)
    first = 0
    if training.checkpoint_exists(path):
        first = training.load_checkpoint(path, model, optimizer)["step"]  # <- on any ranks

    for step in range(first, steps):
        for x in batches(step):
            with accelerator.accumulate(net):
                with training.collect_aux(model) as aux:  # <- the layers' balance losses
                    loss = toy.task_loss(net(x), x)
                accelerator.backward(loss + toy.AUX_WEIGHT * aux.loss)
                if accelerator.sync_gradients:
                    if scaler is not None:
                        scaler.unscale_(optimizer.optimizer)
                    training.clip_grad_norm_(model, toy.MAX_NORM)  # <- over all ranks' experts
                optimizer.step()
                optimizer.zero_grad()
    training.save_checkpoint(path, model, optimizer, {"step": steps})  # <- experts of all ranks
    return model


if __name__ == "__main__":
    toy.main(train)
