"""Training of models whose feed-forward blocks became MoE layers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import every_other, replace_ffn


def check_that_copies_change_nothing(
    model: nn.Module, match: str, experts: str, output: Callable[[nn.Module], torch.Tensor]
) -> None:
    """Replace every other block by copies of itself; the output stays, and the blocks show in it.

    ``experts`` is the class of the network of experts that replaces the blocks.
    """
    model.eval()
    dense = copy.deepcopy(model)
    matched = every_other(model, match)
    blocks = list(replace_ffn(model, matched, 4, copy_weights=True))
    # a layer whose network is no module of its own: its first part becomes the MoE layer
    assert [each.removesuffix(".intermediate") for each in blocks] == matched and len(blocks) == 2
    assert {type(model.get_submodule(each).experts).__name__ for each in blocks} == {experts}
    with torch.no_grad():
        wanted = output(dense)
        torch.testing.assert_close(output(model), wanted, rtol=1e-5, atol=1e-5)
        for each in blocks:
            for param in model.get_submodule(each).experts.parameters():
                param.zero_()
        assert (output(model) - wanted).abs().max() > 1e-3


def check_losses(alone: list[float], by_rank: list[list[float]]) -> None:
    """Assert that the mean loss of the ranks is that of one process, and that it falls."""
    means = [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]
    assert means == pytest.approx(alone, rel=1e-4)
    for losses in (alone, means):
        assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))


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
