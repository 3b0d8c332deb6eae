"""Dropout of the experts' outputs on the rank of the tokens, for experts in parts (r > 1)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..distributed import ExpertParallelism
from .routing import Routing


class SourceDropout(NamedTuple):
    """Dropout of the outputs on the tokens' rank."""

    keep_pairs_M: torch.Tensor  # bool (T K, M)
    copies: int  # r, ranks that each pair goes to; its outputs from all of them get the same mask
    dropout: float

    @classmethod
    def draw(
        cls, model_dim: int, routing: Routing, parallelism: ExpertParallelism, dropout: float
    ) -> SourceDropout:
        """Draw the masks of a call, from torch's generator of the tokens' device."""
        shape, device = (routing.expert_TK.numel(), model_dim), routing.expert_TK.device
        keep_pairs_M = torch.empty(shape, dtype=torch.bool, device=device)
        return cls(keep_pairs_M.bernoulli_(1 - dropout), parallelism.num_destinations, dropout)

    def __call__(
        self, out_RM: torch.Tensor, dest_row_TK: torch.Tensor, src_pair_R: torch.Tensor
    ) -> torch.Tensor:
        """Apply it to the outputs (R, M), or to their gradients."""
        if not len(self.keep_pairs_M):
            return out_RM
        top_k = dest_row_TK.shape[1] // self.copies
        token = src_pair_R.clamp(min=0) // dest_row_TK.shape[1]
        pair_R = token * top_k + src_pair_R.clamp(min=0) % top_k
        return torch.where(self.keep_pairs_M[pair_R], out_RM / (1 - self.dropout), 0.0)
