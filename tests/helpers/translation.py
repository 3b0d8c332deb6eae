"""Pairs of sentences for an encoder-decoder on fairseq's dummy task, as helpers.training has for
language models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fairseq import options
from helpers.training import VOCABULARY, convert
from omegaconf import DictConfig
from torch import nn

from fairseq_tutel.distributed import process_world

# two layers per stack, the second of each sparse
TINY = """
    --task dummy_mt --dict-size 28 --src-len 12 --tgt-len 12 --cpu --seed 3 --no-save
    --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24
    --encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0 --attention-dropout 0
    --share-all-embeddings --optimizer adam --lr 0.01 --batch-size 4 --ddp-backend legacy_ddp
"""
SPARSE = """
    --arch transformer_moe --moe-second-expert-policy all --label-smoothing 0.1
    --criterion moe_label_smoothed_cross_entropy --moe-gate-loss-wt 0.1
"""
STOCK = "--arch transformer --criterion label_smoothed_cross_entropy"
PAD, EOS = 1, 2


def pair_config(*given: str, moe: bool = True) -> DictConfig:
    """fairseq's config for the tiny encoder-decoder, or (``moe=False``) for its own dense one."""
    parser = options.get_training_parser()
    words = [*TINY.split(), *(SPARSE if moe else STOCK).split(), *given]
    return convert(options.parse_args_and_arch(parser, input_args=words))


def make_pairs(
    seed: int, source: Sequence[int] = (7, 5, 7, 4), target: Sequence[int] = (5, 8, 6, 8)
) -> dict:
    """Random sentences of these lengths, padded as fairseq pads them: sources on the left."""
    generator = torch.Generator().manual_seed(2000 + seed)

    def tokens(length):
        rare = torch.randint(4, VOCABULARY, (length,), generator=generator)
        frequent = torch.randint(4, 7, (length,), generator=generator)  # experts overflow
        kept = torch.rand(length, generator=generator) < 0.5
        return torch.cat([torch.where(kept, frequent, rare)[:-1], torch.tensor([EOS])])

    def padded(rows, left):
        width = max(map(len, rows))
        fill = [torch.full((width - len(row),), PAD) for row in rows]
        return torch.stack(
            [torch.cat((f, r) if left else (r, f)) for f, r in zip(fill, rows, strict=True)]
        )

    sources, targets = list(map(tokens, source)), list(map(tokens, target))
    return {
        "id": torch.arange(len(sources)),
        "net_input": {
            "src_tokens": padded(sources, left=True),
            "src_lengths": torch.tensor(source),
            "prev_output_tokens": padded([row.roll(1) for row in targets], left=False),
        },
        "target": padded(targets, left=False),
        "nsentences": len(sources),
        "ntokens": sum(target),
    }


def own_pairs(update: int, total: int) -> list[dict]:
    """This rank's share of the ``total`` batches of an update: as many per rank, in rank order."""
    rank, world_size = process_world()
    share = total // world_size
    return [make_pairs(100 * update + rank * share + i) for i in range(share)]


class LoopOverExperts(nn.Module):
    """Definition of a top-2 layer that drops nothing, out of a model's parameters by name."""

    def __init__(self, state, prefix):
        super().__init__()
        self.gate = state[f"{prefix}.gate.wg.weight"]
        self.experts = [
            [state[f"{prefix}.experts.{e}.{name}"] for name in
             ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")]
            for e in range(4)
        ]  # fmt: skip

    def forward(self, x):
        y = torch.zeros_like(x)
        for index in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])):
            token = x[tuple(index)]
            best = (self.gate @ token).topk(2)
            shares = best.values.softmax(0)
            for share, expert in zip(shares, best.indices, strict=True):
                w1, b1, w2, b2 = self.experts[expert]
                y[tuple(index)] += share * (w2 @ (w1 @ token + b1).relu() + b2)
        return y
