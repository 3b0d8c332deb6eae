"""Tutel's cumulative sum minus one, in plain torch."""

import torch
from torch import Tensor


def fast_cumsum_sub_one(mask_TE: Tensor) -> Tensor:
    """Cumulative sum over dim 0, minus one, int32: Tutel's slot computation on a 0/1 mask."""
    return mask_TE.cumsum(dim=0, dtype=torch.int32).sub_(1)
