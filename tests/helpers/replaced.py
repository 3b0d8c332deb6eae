"""Training of models whose feed-forward blocks became MoE layers."""

from collections.abc import Callable

import torch
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import every_other, replace_ffn


def train_replaced(
    model: nn.Module, match: str, loss_of: Callable[[nn.Module, slice], torch.Tensor]
) -> list[float]:
    """Losses of four steps of a model with experts in every other block, on any number of ranks.

    ``loss_of`` takes the (wrapped) model, and which of the four rows are this rank's.
    """
    rank, world_size = process_world()
    replace_ffn(
        model, every_other(model, match), 4, copy_weights=True, capacity_factor=0.0,
        balance_scope="global",
    )  # fmt: skip
    model.train()
    share = 4 // world_size
    net = training.wrap_data_parallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rows = slice(rank * share, (rank + 1) * share)
    return take_steps(model, optimizer, lambda: loss_of(net, rows))


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]
) -> list[float]:
    """Losses of four steps with balance losses and a clipped norm."""
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with training.collect_aux(model) as aux:
            loss = loss_of()
        (loss + 0.01 * aux.loss).backward()
        training.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
