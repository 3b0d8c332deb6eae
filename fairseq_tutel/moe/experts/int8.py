"""Quantize weights to int8, and compute an expert with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...backends._torch_private import int8_product

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


def expert_ffn_int8(rows_NM: Tensor, held: Mapping[str, Any], activation: str) -> Tensor:
    """Compute one expert on bf16 rows, fp32 (N, M), whose widths are multiples of INT8_MULTIPLE.

    Products are summed in fp32 and rounded to bf16. All else is computed in fp32. ``held`` are the
    expert's tensors of a fused network by name, its weights as :class:`Int8`.
    """
    w1, w2 = (Int8(*(v.flatten(0, 1) for v in held[f"fc{i}_weight"])) for i in (1, 2))
    b1, b2 = (held.get(f"fc{i}_bias") for i in (1, 2))
    z_NF = int8_product(rows_NM.contiguous(), *w1).float()
    z_NF = z_NF if b1 is None else z_NF.add_(b1.flatten())
    active_NF = ops.activate(z_NF, activation).bfloat16()
    y_NM = int8_product(active_NF, *w2).float()
    return y_NM if b2 is None else y_NM.add_(b2.flatten())
