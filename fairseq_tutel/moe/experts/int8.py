"""Weights of one byte: how they are made, and an expert's product with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops

# torch's kernel reads past the end of rows whose width is not a multiple
INT8_MULTIPLE = 32


class Int8(NamedTuple):
    """A weight as ``value * scale``, [n, A, B] int8 and [n, A] bf16."""

    value: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        """Round to nearest, symmetric around 0. A row of zeros stays one."""
        largest = weight.float().abs().amax(-1)
        scale = (largest.clamp(min=torch.finfo(torch.float32).tiny) / 127).to(torch.bfloat16)
        scaled = weight.float() / scale.float()[..., None]
        return cls(scaled.round_().clamp_(-127, 127).to(torch.int8), scale)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that it stands for."""
        return self.value.to(dtype) * self.scale[..., None].to(dtype)


def expert_ffn_int8(
    rows_NM: Tensor,
    w1: Tensor,
    scale1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    scale2: Tensor,
    b2: Tensor | None,
    *,
    activation: str,
) -> Tensor:
    """Compute one expert on bf16 rows, fp32 (N, M).

    Products add up in fp32 and are rounded to bf16, all else is computed in fp32.

    Args:
        w1, w2: int8 (F, M) and (M, F); (2F, M) of a gated network.
        scale1, scale2: bf16, a scale of each row of a weight.
        b1, b2: biases, or None.
    """
    # torch has no public form of this product
    z_NF = torch._weight_int8pack_mm(rows_NM.contiguous(), w1, scale1).float()
    z_NF = z_NF if b1 is None else z_NF.add_(b1)
    active_NF = ops.activate(z_NF, activation).bfloat16()
    y_NM = torch._weight_int8pack_mm(active_NF, w2, scale2).float()
    return y_NM if b2 is None else y_NM.add_(b2)
