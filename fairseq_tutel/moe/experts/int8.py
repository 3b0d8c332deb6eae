"""Quantize weights to int8, and compute an expert with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops

# torch's kernel reads past the end of rows whose width is not a multiple
INT8_MULTIPLE = 32


class Int8(NamedTuple):
    """Quantized weight: ``value * scale``, [..., A, B] int8 and [..., A] bf16."""

    value: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        """Quantize by rounding to nearest, symmetric around 0. A row of zeros stays zero."""
        largest = weight.float().abs().amax(-1)
        scale = (largest.clamp(min=torch.finfo(torch.float32).tiny) / 127).to(torch.bfloat16)
        scaled = weight.float() / scale.float()[..., None]
        return cls(scaled.round_().clamp_(-127, 127).to(torch.int8), scale)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight."""
        return self.value.to(dtype) * self.scale[..., None].to(dtype)


def expert_ffn_int8(
    rows_NM: Tensor, w1: Int8, b1: Tensor | None, w2: Int8, b2: Tensor | None, *, activation: str
) -> Tensor:
    """Compute one expert on bf16 rows, fp32 (N, M).

    Products are summed in fp32 and rounded to bf16. All else is computed in fp32. The weights are
    (F, M), or (2F, M) for a gated network, and (M, F).
    """
    product = getattr(torch, "_weight_int8pack_mm")  # noqa: B009, torch has no public form
    z_NF = product(rows_NM.contiguous(), *w1).float()
    z_NF = z_NF if b1 is None else z_NF.add_(b1)
    active_NF = ops.activate(z_NF, activation).bfloat16()
    y_NM = product(active_NF, *w2).float()
    return y_NM if b2 is None else y_NM.add_(b2)
