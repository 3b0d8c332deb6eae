"""A model of fairseq2 with experts, in a loop of one's own; the lines that they need are marked.

    torchrun --nproc-per-node 2 scripts/examples/hosts/with_fairseq2.py run/checkpoint_last.pt

fairseq2's own trainer cannot train it. Three of its parts know one kind of parameter:

- clipping: ``clip_grad_norm`` takes each rank's norm, and ranks have different experts, so
  ``check_grad_norms`` ends the run;
- files: one rank of a data parallel group writes the model, so other ranks' experts are lost;
- wrappers: its DDP and FSDP average or shard every parameter, also different experts.
"""

import argparse

import torch
import torch.distributed as dist
from fairseq2.models.qwen import QwenConfig, create_qwen_model
from fairseq2.nn import BatchLayout

from fairseq_tutel import training
from fairseq_tutel.moe import every_other, replace_ffn

VOCABULARY, SEQUENCES, LENGTH = 50, 8, 16  # of a batch of all ranks
SIZES = {"model_dim": 32, "num_layers": 4, "num_attn_heads": 4, "num_key_value_heads": 2}


def build():
    """Make a small Qwen, every other layer of which has experts that start as its FFN."""
    torch.manual_seed(1)
    model = create_qwen_model(QwenConfig(vocab_size=VOCABULARY, ffn_inner_dim=64, **SIZES))
    blocks = every_other(model, r"decoder\.layers\.\d+\.ffn$")
    routing = {"capacity_factor": 0.0, "balance_scope": "global", "seed": 1}
    replace_ffn(model, blocks, 4, copy_weights=True, **routing)  # <- after the ranks are connected
    return model


def batch(step, rank, ranks):
    """Return this rank's share of sequences whose tokens each follow from the one before."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    tokens = (first + 7 * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens.chunk(ranks)[rank]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="X.pt; trained on if it exists")
    parser.add_argument("--steps", type=int, default=20, help="of the whole training")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    net = training.wrap_data_parallel(model)  # <- in place of fairseq2's to_ddp
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if training.checkpoint_exists(args.checkpoint):
        first = training.load_checkpoint(args.checkpoint, model, optimizer)["step"]  # <-
    for step in range(first, args.steps):
        tokens = batch(step, rank, ranks)
        layout = BatchLayout.of(tokens[:, :-1])
        with training.collect_aux(model) as aux:  # <- the layers' balance losses
            loss = net(tokens[:, :-1], layout, targets=tokens[:, 1:]) / tokens[:, 1:].numel()
        (loss + 0.01 * aux.loss).backward()
        training.clip_grad_norm_(net, 1.0)  # <- over all ranks' experts
        optimizer.step()
        optimizer.zero_grad()
    training.save_checkpoint(args.checkpoint, model, optimizer, {"step": args.steps})  # <-
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss of step {args.steps}: {total / ranks:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
