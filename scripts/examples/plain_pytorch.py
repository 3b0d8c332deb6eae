"""An MoE layer in a plain PyTorch loop: trains, saves, and resumes on any number of ranks.

    torchrun --nproc-per-node 2 scripts/examples/plain_pytorch.py --steps 20 run/checkpoint_last.pt
    torchrun --nproc-per-node 4 scripts/examples/plain_pytorch.py --steps 40 run/checkpoint_last.pt
    python scripts/examples/plain_pytorch.py --steps 60 run/checkpoint_last.pt

The second command goes on at step 20 and the third at step 40. A step is over 8 sequences, whatever
the number of ranks; on GPUs, one process per GPU.
"""

import argparse
import os

import torch
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.moe import MoELayer

DIM, LENGTH, SEQUENCES = 32, 16, 8


class Block(nn.Module):
    """Feed-forward block of a transformer with an MoE layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoELayer(DIM, num_experts=4, hidden_dim=4 * DIM, capacity_factor=0.0, seed=1)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def batch(step, rank, world_size, device):
    """This rank's share of the sequences of a step."""
    x = torch.randn(SEQUENCES, LENGTH, DIM, generator=torch.Generator().manual_seed(step))
    return x.chunk(world_size)[rank].to(device)


def main():
    """Train up to ``--steps``, from the checkpoint if it is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="X.pt; trained on if it exists")
    parser.add_argument("--steps", type=int, default=20, help="of the whole training")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1:  # before the model is built: its experts are then spread over the ranks
        torch.distributed.init_process_group()

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(DIM, DIM), Block(), nn.Linear(DIM, DIM)).to(device)
    net = training.wrap_data_parallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if training.checkpoint_exists(args.checkpoint):
        first = training.load_checkpoint(args.checkpoint, model, optimizer)["step"]

    for step in range(first, args.steps):
        x = batch(step, rank, world_size, device)
        with training.collect_aux(model) as aux:
            loss = (net(x) - x.roll(1, -1)).square().mean()
        (loss + 1e-3 * aux.loss).backward()
        norm = training.clip_grad_norm_(net, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f} gradient norm {norm.item():.4f}")
    training.save_checkpoint(args.checkpoint, model, optimizer, {"step": args.steps})
    if world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
