"""Lightning's Trainer around a model with experts; the lines that they need are marked.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_lightning.py run/checkpoint_last.pt

Refused: clipping without configure_gradient_clipping; trainer.save_checkpoint.
"""

import pytorch_lightning as pl
import torch
import toy

from fairseq_tutel import training


class Module(pl.LightningModule):
    def __init__(self, *given):
        super().__init__()
        self.model, (self.build, self.batches, self.steps, self.path) = None, given

    def configure_model(self):
        if self.model is None:
            self.model = self.build()  # <- here, where the ranks are connected
            training.prepare_data_parallel(self)  # <- the module that Lightning wraps

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=toy.RATE)

    def train_dataloader(self):
        self.state, first = (self.path, self.model, *self.trainer.optimizers), 0
        if training.checkpoint_exists(self.path):
            first = training.load_checkpoint(*self.state)["step"]  # <- on any ranks
        return (x for step in range(first, self.steps) for x in self.batches(step))

    def training_step(self, x, _):
        with training.collect_aux(self.model) as aux:  # <- the layers' balance losses
            return toy.task_loss(self.model(x), x) + toy.AUX_WEIGHT * aux.loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, *_, **__):
        training.clip_grad_norm_(self.model, gradient_clip_val)  # <- over all ranks' experts

    def on_train_end(self):
        training.save_checkpoint(*self.state, {"step": self.steps})  # <- experts of all ranks

    def on_save_checkpoint(self, checkpoint):  # <-
        raise ValueError("Lightning saves rank 0's experts only: use training.save_checkpoint")


def train(build, batches, steps, path, scaler=None):
    """Up to ``steps`` steps; ``scaler``: fairseq_tutel.training.grad_scaler(), for fp16."""
    ranks = toy.world_size()
    half = [pl.plugins.MixedPrecision("16-mixed", "cuda", scaler)] if scaler else []  # <- all skip
    loop = {"gradient_clip_val": toy.MAX_NORM, "accumulate_grad_batches": toy.ACCUMULATE}
    rest = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "plugins": half}
    strategy, module = "ddp" if ranks > 1 else "auto", Module(build, batches, steps, path)
    pl.Trainer(devices=ranks, strategy=strategy, **loop, **rest).fit(module)
    return module.model


if __name__ == "__main__":
    toy.main(train)
