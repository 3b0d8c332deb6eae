"""Grouped products of e4m3 values, for a torch that has none (before 2.10)."""

import torch
from torch import Tensor

from ._grouped import launch_rows_product


def scaled_product(
    rows: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``rows @ weight`` of each expert in ``dtype``, for values in e4m3 times fp32 scales.

    Rows are (R, A) and (R,); without offsets (e, N, A) and (e, N). The weight is (e, A, B), with
    any strides, and (e, B).
    """
    (values, scale), columns = rows, weight[0].shape[2]
    if offsets is None:
        experts, rows_each, _ = values.shape
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=values.device) * rows_each
        flat = values.flatten(0, 1), scale.flatten()
        return scaled_product(flat, weight, ends, dtype).view(experts, rows_each, columns)
    out_RB = scale.new_empty((len(values), columns), dtype=dtype)
    if out_RB.numel() > 0:
        launch_rows_product(out_RB, values, weight[0], offsets, None, scale, weight[1])
    return out_RB
