"""Experts that are updated in the backward pass: ``--moe-update-in-backward``.

fairseq divides gradients by the sample size of all ranks after the backward pass. Here it is summed
before the backward pass (a small all-reduce).
"""

from typing import Any

import torch
from fairseq.optim.composite import CompositeOptimizer
from fairseq.optim.fp16_optimizer import MemoryEfficientFP16Optimizer
from torch import nn

from ....distributed import process_world, sum_over_ranks
from ....training import BackwardUpdates, update_in_backward


def refuse_update_in_backward(cfg: Any) -> None:
    """Raise ValueError for options that need the gradients of all experts at once."""
    common, flag = cfg.common, "--moe-update-in-backward uses a gradient as soon as it is complete"
    freq = max(cfg.optimization.update_freq)
    half = common.fp16 or common.memory_efficient_fp16
    copies = common.bf16 and not common.memory_efficient_bf16
    sharded = cfg.distributed_training.zero_sharding != "none"
    for on, why in (
        (cfg.optimization.clip_norm > 0, f"--clip-norm {cfg.optimization.clip_norm} needs all: "
         "give --clip-norm 0"),
        (freq > 1, f"--update-freq {freq} adds those of several passes: give --update-freq 1"),
        (half, "the loss scale of --fp16 may overflow in others: give --memory-efficient-bf16"),
        (copies, "--bf16 keeps fp32 copies of all: give --memory-efficient-bf16"),
        (sharded, "--zero-sharding os steps all together: leave it out"),
    ):  # fmt: skip
        if on:
            raise ValueError(f"{flag}, and {why}")


class ExpertUpdates:
    """Updates of a trainer's experts in the backward pass; ``is_filler``: next comes a dummy."""

    def __init__(self, model: nn.Module, criterion: nn.Module, normalization: str):
        self._model, self._normalization = model, normalization
        self._updates: BackwardUpdates | None = None
        self._is_efficient = self.is_filler = False
        criterion.register_forward_hook(self._agree)

    def attach(self, optimizer: Any, name: str) -> None:
        """Take an optimizer of fairseq in place of the former one; ``name``: ``--optimizer``."""
        if isinstance(optimizer.optimizer, CompositeOptimizer) or name == "lamb":
            raise ValueError(f"--moe-update-in-backward needs adam, nag or sgd, not {name}")
        self.detach()
        self._is_efficient = isinstance(optimizer, MemoryEfficientFP16Optimizer)
        self._updates = update_in_backward(self._model, optimizer.optimizer, self._normalization)

    def detach(self) -> None:
        """Leave the experts to usual steps."""
        if self._updates is not None:
            self._updates.remove()
        self._updates = None

    def _agree(self, criterion: nn.Module, args: tuple, result: tuple) -> None:
        if not criterion.training or self._updates is None:
            return
        size = 0.0 if self.is_filler else float(result[1])
        world_size = process_world()[1]
        if world_size > 1:
            (size,) = sum_over_ranks([size], next(self._model.parameters()).device)
        self._updates.factor = world_size / (size or 1.0)

    def sq_norm(self) -> torch.Tensor:
        """Return the squared norm of the experts' gradients of this update. Collective."""
        # with --memory-efficient-bf16 fairseq divides norms by the sample size later
        factor = 1.0 if self._is_efficient else self._updates.factor
        return self._updates.take_sq_norm() * factor**2
