"""Gradients of low-rank updates of the experts' weights."""

import torch
from torch import Tensor

from .backend import implementation


def low_rank_bwd(
    d: Tensor, rows: Tensor, a_erA: Tensor, b_eBr: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B in ``rows @ (B @ A).T`` of every expert.

    Four products per expert have r rows or columns each. None is as large as a weight's gradient.

    Args:
        d: (R, B), gradient of the product; (e, N, B) without ``offsets``.
        rows: (R, A), or (e, N, A).
        a_erA, b_eBr: in the dtype of the rows.
        offsets: (e,) int32 end row of each expert; None for padded rows.
    """
    d = d.reshape(*rows.shape[:-1], d.shape[-1])
    if offsets is not None:
        return implementation("low_rank_bwd", rows)(d, rows, a_erA, b_eBr, offsets)
    d_u, u = torch.bmm(d, b_eBr), torch.bmm(rows, a_erA.mT)
    return torch.bmm(d_u.mT, rows), torch.bmm(d.mT, u)
