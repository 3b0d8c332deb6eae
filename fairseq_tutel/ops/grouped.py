"""Products of each expert's own rows, without autograd."""

import torch
from torch import Tensor

from .backend import implementation


def rows_product(rows: Tensor, weight_eAB: Tensor, offsets: Tensor | None) -> Tensor:
    """Return ``rows @ weight`` of each expert, [R, A] -> [R, B].

    ``offsets`` (e,) int32 are the end rows of experts; None for (e, N, A) -> (e, N, B).
    """
    if offsets is None:
        return torch.bmm(rows, weight_eAB)
    return implementation("rows_product", rows)(rows, weight_eAB, offsets)


def weight_gradient(d: Tensor, rows: Tensor, offsets: Tensor | None) -> Tensor:
    """Return ``d.T @ rows`` of each expert's rows, [R, B] and [R, A] -> (e, B, A).

    ``offsets`` (e,) int32 are the end rows of experts; None for (e, N, ...).
    """
    if offsets is None:
        return torch.bmm(d.mT, rows)
    return implementation("weight_gradient", rows)(d, rows, offsets)
