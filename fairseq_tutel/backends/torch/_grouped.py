"""Products of each expert with its own rows of a ragged buffer, one after the other.

For GPUs without Triton; NOTE: the host reads the offsets.
"""

import torch
from torch import Tensor


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def rows_product(rows_RA: Tensor, weight_eAB: Tensor, offsets: Tensor) -> Tensor:
    """``rows[begin_x : end_x] @ weight[x]`` for every expert x, (R, B); unspecified past the last
    end.
    """
    out_RB = rows_RA.new_empty(rows_RA.shape[0], weight_eAB.shape[2])
    for expert, (begin, end) in enumerate(_spans(offsets)):
        torch.mm(rows_RA[begin:end], weight_eAB[expert], out=out_RB[begin:end])
    return out_RB


def weight_gradient(d_RA: Tensor, rows_RB: Tensor, offsets: Tensor) -> Tensor:
    """``d[begin_x : end_x].T @ rows[begin_x : end_x]`` for every expert x, (e, A, B)."""
    out_eAB = d_RA.new_empty(offsets.shape[0], d_RA.shape[1], rows_RB.shape[1])
    for expert, (begin, end) in enumerate(_spans(offsets)):
        torch.mm(d_RA[begin:end].t(), rows_RB[begin:end], out=out_eAB[expert])
    return out_eAB
