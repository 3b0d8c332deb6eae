"""Operator of Tutel's cumulative sum minus one."""

import torch
from torch import Tensor

from .backend import implementation


@torch.library.custom_op("fairseq_tutel::fast_cumsum_sub_one", mutates_args=())
def _fast_cumsum_sub_one(mask: Tensor) -> Tensor:
    return implementation("fast_cumsum_sub_one", mask)(mask)


@_fast_cumsum_sub_one.register_fake
def _(mask):
    return mask.new_empty(mask.shape, dtype=torch.int32)


def fast_cumsum_sub_one(mask_TE: Tensor) -> Tensor:
    """Cumulative sum over dim 0 minus one, (T, E) int32; Tutel's function of the same name.

    Args:
        mask_TE: (T, E) integer or bool.

    Raises:
        ValueError: not two-dimensional, or a floating-point mask.
    """
    if mask_TE.dim() != 2 or mask_TE.is_floating_point() or mask_TE.is_complex():
        raise ValueError(
            f"mask must be (tokens, experts) of integers or bool, got "
            f"{tuple(mask_TE.shape)} {mask_TE.dtype}"
        )
    return _fast_cumsum_sub_one(mask_TE)
