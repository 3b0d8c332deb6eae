"""Load of a layer's experts over an update (``balance_scope="update"``)."""

from __future__ import annotations

import copy
import logging

import torch

from .recomputation import has_gradients

logger = logging.getLogger(__name__)

_PASSES_UNTIL_WARNING = 1024


class UpdateLoad:
    """Choices of a layer's experts in the forward passes of an update."""

    def __init__(self):
        # int64 [E + 1], pairs by expert and their number, over all ranks; None before the first
        self.pairs: torch.Tensor | None = None
        self._passes = 0

    def of_call(self) -> UpdateLoad:
        """Return what sums the pairs of a call: a copy for a call that gets no gradients."""
        return self if has_gradients() else copy.copy(self)

    def add(self, pairs: torch.Tensor) -> torch.Tensor:
        """Add a pass's pairs of all ranks, int64 [E + 1]; return the sum over the update so far."""
        self.pairs = pairs if self.pairs is None else self.pairs + pairs
        self._passes += 1
        if self._passes == _PASSES_UNTIL_WARNING:
            logger.warning(
                "balance_scope='update' has summed the load of %d forward passes: call "
                "fairseq_tutel.training.end_update(model) after each optimizer step",
                self._passes,
            )
        return self.pairs

    def reset(self) -> None:
        """Begin a new update."""
        self.pairs, self._passes = None, 0
