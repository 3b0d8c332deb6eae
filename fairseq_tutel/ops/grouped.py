"""Products of each expert's own rows; only grouped_linear has a gradient."""

import torch
from torch import Tensor

from ._operator import operator, save_inputs
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


@operator(
    "grouped_linear", lambda rows, weight, offsets: rows.new_empty(len(rows), weight.shape[1])
)
def _grouped_linear(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows_product(rows, weight.mT, offsets)


@operator(
    "grouped_linear_bwd",
    lambda d, rows, weight, offsets: (rows.new_empty(rows.shape), weight.new_empty(weight.shape)),
)
def _grouped_linear_bwd(
    d: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return rows_product(d, weight, offsets), weight_gradient(d, rows, offsets)


def _backward(ctx, d):
    return *_grouped_linear_bwd(d.contiguous(), *ctx.saved_tensors), None


_grouped_linear.register_autograd(_backward, setup_context=save_inputs)


def grouped_linear(
    rows: Tensor, weight_eBA: Tensor, offsets: Tensor, bias_eB: Tensor | None = None
) -> Tensor:
    """Return ``rows @ weight.T + bias`` of each expert, [R, A] -> [R, B], zero after the last row.

    A differentiable operator, so that a graph need not know ``offsets`` (e,) int32.
    """
    out = _grouped_linear(rows, weight_eBA, offsets)
    if bias_eB is None:
        return out
    row = torch.arange(len(rows), device=rows.device, dtype=offsets.dtype)
    expert_R = torch.bucketize(row, offsets, right=True)
    bias_eB = torch.cat([bias_eB, bias_eB.new_zeros(1, bias_eB.shape[1])])
    return out + bias_eB[expert_R]
