"""Common parts of the recipes of this folder: a small model, its data, a command line.

A recipe is one function, ``train(build, batches, steps, path, scaler=None)``: it builds the model
once the ranks are connected, goes on from the checkpoint ``path`` if there is one, and saves there.
The lines that experts need are marked ``# <-``.
"""

import argparse
import os

import torch
from torch import nn

from fairseq_tutel.moe import MoELayer, every_other, replace_ffn

DIM, LENGTH, SEQUENCES = 16, 8, 8  # of a micro-batch of all ranks
ACCUMULATE, MAX_NORM, AUX_WEIGHT, RATE = 2, 0.1, 0.01, 1e-2


class Block(nn.Module):
    """Feed-forward block of a transformer with an MoE layer."""

    def __init__(self, num_experts):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        # the balance of all ranks, so that any number of them trains as one process does
        routing = {"capacity_factor": 0.0, "balance_scope": "global"}
        self.moe = MoELayer(DIM, num_experts, hidden_dim=2 * DIM, seed=1, **routing)

    def forward(self, x, return_aux=False):
        y, aux = self.moe(self.norm(x), return_aux=True) if return_aux else (None, None)
        return (x + y, aux.loss) if return_aux else x + self.moe(self.norm(x))


class Model(nn.Module):
    """Maps [sequences, length, DIM] to the same shape."""

    def __init__(self, num_experts=4):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.block = Block(num_experts)

    def forward(self, x, return_aux=False):
        if not return_aux:
            return self.outer(self.block(self.inner(x)))
        y, aux_loss = self.block(self.inner(x), return_aux=True)
        return self.outer(y), aux_loss


def task_loss(y, x):
    """Data of a task that can be learned: each number is the one before it."""
    return (y - x.roll(1, -1)).square().mean()


def world_size():
    """Ranks, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", 1))


def batches(step):
    """This rank's share of the micro-batches of a step."""
    rank = int(os.environ.get("RANK", 0))
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ACCUMULATE, SEQUENCES, LENGTH, DIM, generator=generator)
    return [each.chunk(world_size())[rank] for each in x]


def llama(num_experts=4):
    """A small Llama with experts in its second layer, each of which starts as the block there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": DIM, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    routing = {"capacity_factor": 0.0, "balance_scope": "global", "seed": 1}
    replace_ffn(model, every_other(model, r"\.mlp$"), num_experts, copy_weights=True, **routing)
    return model


# of transformers.TrainingArguments
OPTIONS = {
    "gradient_accumulation_steps": ACCUMULATE, "max_grad_norm": MAX_NORM, "learning_rate": RATE,
    "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential",
    "report_to": "none", "disable_tqdm": True,
    "use_cpu": not torch.cuda.is_available(),  # else accelerate leaves CPU ranks unconnected
}  # fmt: skip


# DeepSpeed's options; a batch's size is of no consequence where it is given no data
DEEPSPEED = {
    "zero_optimization": {"stage": 1}, "gradient_clipping": MAX_NORM,
    "gradient_accumulation_steps": ACCUMULATE, "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip


def samples(steps):
    """A dataset of transformers for so many steps of all ranks."""
    shape = steps * ACCUMULATE * SEQUENCES, LENGTH
    rows = torch.randint(50, shape, generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def main(train, build=Model, data=batches):
    """``torchrun --nproc-per-node 2 with_X.py run/checkpoint_last.pt --steps 20``"""
    parser = argparse.ArgumentParser(description="A recipe: see the file.")
    parser.add_argument("checkpoint", help="X.pt; trained on if it exists")
    parser.add_argument("--steps", type=int, default=20, help="of the whole training")
    args = parser.parse_args()
    if world_size() > 1:
        torch.distributed.init_process_group("gloo")
    model = train(build, data, args.steps, args.checkpoint).eval()
    if data is batches:
        x = torch.cat(batches(args.steps))
        with torch.no_grad():
            print(f"loss after {args.steps} steps: {task_loss(model(x), x):.4f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
