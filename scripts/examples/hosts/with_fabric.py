"""Lightning Fabric around a model with experts; the lines that they need are marked.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_fabric.py run/checkpoint_last.pt

Refused: fabric.clip_gradients (each rank would clip by its own experts), and loading what
fabric.save wrote (rank 0's experts only).
"""

import torch
import toy
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision

from fairseq_tutel import training


def train(build, batches, steps, path, scaler=None):
    """Up to ``steps`` steps, from the checkpoint if there is one.

    ``scaler``: fairseq_tutel.training.grad_scaler(), for fp16.
    """
    ranks = toy.world_size()
    half = [] if scaler is None else [MixedPrecision("16-mixed", "cuda", scaler)]  # <- all skip
    strategy = "ddp" if ranks > 1 else "auto"
    fabric = Fabric(strategy=strategy, devices=ranks, plugins=half)
    fabric.launch()
    model = build()  # <- after launch, which connects the ranks
    training.prepare_data_parallel(model)  # <- before fabric.setup
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.RATE)
    net, wrapped = fabric.setup(model, optimizer)
    first = 0
    if training.checkpoint_exists(path):
        first = training.load_checkpoint(path, model, optimizer)["step"]  # <- on any ranks

    for step in range(first, steps):
        micro_batches = batches(step)
        for number, x in enumerate(micro_batches, 1):
            with fabric.no_backward_sync(net, enabled=number < len(micro_batches)):
                with training.collect_aux(model) as aux:  # <- the layers' balance losses
                    loss = toy.task_loss(net(x), x)
                fabric.backward((loss + toy.AUX_WEIGHT * aux.loss) / len(micro_batches))
        if scaler is not None:
            scaler.unscale_(optimizer)
        training.clip_grad_norm_(model, toy.MAX_NORM)  # <- over all ranks' experts
        wrapped.step()
        wrapped.zero_grad()
    training.save_checkpoint(path, model, optimizer, {"step": steps})  # <- experts of all ranks
    return model


if __name__ == "__main__":
    toy.main(train)
