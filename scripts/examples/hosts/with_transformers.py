"""Hugging Face's Trainer, and a Llama whose feed-forward blocks became MoE layers.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_transformers.py run

The lines that experts need are marked. Trainer itself is refused on several ranks: it clips by one
rank's experts, and its save_model writes those of rank 0.
"""

import os

import toy
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fairseq_tutel.integrations.transformers import MoETrainer


def train(build, samples, steps, folder, scaler=None):
    """Up to ``steps`` steps; ``scaler``: fairseq_tutel.training.grad_scaler(), for fp16."""
    args = TrainingArguments(folder, max_steps=steps, save_steps=steps, **toy.OPTIONS)
    args.per_device_train_batch_size = toy.SEQUENCES // args.world_size
    model = build()  # <- once the ranks are connected, as args.world_size does
    trainer = MoETrainer(model, args, train_dataset=samples, aux_weight=toy.AUX_WEIGHT)  # <-
    if scaler is not None:  # Trainer makes one for fp16=True
        trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and get_last_checkpoint(folder))
    return model


if __name__ == "__main__":
    toy.main(train, toy.llama, toy.samples(100))
