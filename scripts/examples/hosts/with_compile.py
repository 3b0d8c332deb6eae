"""torch.compile of a model around an MoE layer; the lines that it needs are marked.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_compile.py run/checkpoint_last.pt

Refused: torch.nn.utils.clip_grad_norm_ and a GradScaler of torch's own, as without torch.compile.
"""

import torch
import toy
from torch.nn.parallel import DistributedDataParallel

from fairseq_tutel import training


def train(build, batches, steps, path, scaler=None, backend="inductor"):
    """Up to ``steps`` steps, from the checkpoint if there is one.

    ``scaler``: fairseq_tutel.training.grad_scaler(), for fp16; ``backend``: of torch.compile.
    """
    model = build()  # <- after init_process_group
    net = torch.compile(model, backend=backend)
    if torch.distributed.is_initialized():
        training.prepare_data_parallel(net)  # <- what is compiled asks no hooks inside
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.RATE)
    first = 0
    if training.checkpoint_exists(path):
        first = training.load_checkpoint(path, model, optimizer)["step"]  # <- on any ranks

    for step in range(first, steps):
        micro_batches = batches(step)
        for x in micro_batches:
            y, aux_loss = net(x, return_aux=True)  # <- a compiled model hands them on by itself
            loss = toy.task_loss(y, x) + toy.AUX_WEIGHT * aux_loss
            loss = loss / len(micro_batches)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        training.clip_grad_norm_(model, toy.MAX_NORM)  # <- over all ranks' experts
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        optimizer.zero_grad()
    training.save_checkpoint(path, model, optimizer, {"step": steps})  # <- experts of all ranks
    return model


if __name__ == "__main__":
    toy.main(train)
