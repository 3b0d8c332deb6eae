"""Hugging Face's Trainer, and a Llama whose feed-forward blocks became MoE layers.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_transformers.py run

The lines that experts need are marked. Refused: a Trainer without these methods, which clips by one
rank's experts, and whose save_model writes rank 0's.
"""

import os

import toy
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fairseq_tutel import training


class MoETrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with training.collect_aux(model) as aux:  # <- the layers' balance losses
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        counted = num_items_in_batch is not None  # then nobody divides by the micro-batches
        loss += toy.AUX_WEIGHT * aux.loss / (toy.ACCUMULATE if counted else 1)
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model):  # <- over all ranks' experts
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self.optimizer.optimizer)
        return training.clip_grad_norm_(model, self.args.max_grad_norm)

    def save_model(self, output_dir=None, _internal_call=False):
        self._save(output_dir, training.full_state_dict(self.model))  # <- experts of all ranks

    def _save_optimizer_and_scheduler(self, output_dir):  # <- what any number of ranks resumes
        extra = {"schedule": self.lr_scheduler.state_dict()}
        training.save_checkpoint(f"{output_dir}/run.pt", self.model, self.optimizer, extra)

    def _load_from_checkpoint(self, *_):
        """The weights come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint):  # <-
        if checkpoint is not None:
            extra = training.load_checkpoint(f"{checkpoint}/run.pt", self.model, self.optimizer)
            self.lr_scheduler.load_state_dict(extra["schedule"])


def train(build, samples, steps, folder, scaler=None):
    """Up to ``steps`` steps; ``scaler``: fairseq_tutel.training.grad_scaler(), for fp16."""
    args = TrainingArguments(folder, max_steps=steps, save_steps=steps, **toy.OPTIONS)
    args.per_device_train_batch_size = toy.SEQUENCES // args.world_size
    model = build()  # <- once the ranks are connected, as args.world_size does
    training.prepare_data_parallel(model)  # <- before Trainer
    trainer = MoETrainer(model, args, train_dataset=samples)
    trainer.accelerator.scaler = scaler  # <- an overflow on one rank: all skip the step
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and get_last_checkpoint(folder))
    return model


if __name__ == "__main__":
    toy.main(train, toy.llama, toy.samples(100))
