"""Slices of experts, put together again."""

import torch

from fairseq_tutel.distributed import slice_dim


def join_slices(slices, name):
    """The whole of which these are all slices, in order; fc2's bias is the same on all holders."""
    dim = slice_dim(name)
    return slices[0] if dim is None else torch.cat(slices, dim)
