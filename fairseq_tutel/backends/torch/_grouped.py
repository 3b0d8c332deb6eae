"""Grouped products in plain torch: each expert multiplies its own rows of a ragged buffer."""

import itertools

import torch
from torch import Tensor


def rows_product(rows_RA: Tensor, weight_eAB: Tensor, offsets: Tensor) -> Tensor:
    """Return ``rows @ weight`` of each expert, (R, B), zero past the last expert's rows.

    NOTE: on a GPU the host waits for the offsets, (e,) int32 end row of each expert.
    """
    out_RB = rows_RA.new_empty((len(rows_RA), weight_eAB.shape[2]))
    ends = [0, *offsets.tolist()]
    for weight, (begin, end) in zip(weight_eAB, itertools.pairwise(ends), strict=True):
        torch.mm(rows_RA[begin:end], weight, out=out_RB[begin:end])
    out_RB[ends[-1] :] = 0
    return out_RB


def weight_gradient(d_RB: Tensor, rows_RA: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of each expert's weight [B, A], (e, B, A).

    NOTE: on a GPU the host waits for the offsets.
    """
    d_weight = rows_RA.new_empty((len(offsets), d_RB.shape[1], rows_RA.shape[1]))
    ends = [0, *offsets.tolist()]
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        torch.mm(d_RB[begin:end].t(), rows_RA[begin:end], out=d_weight[expert])
    return d_weight
