"""Values rounded to a narrow format, by default fp8 (e4m3), with one scale per row."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_TINY = torch.finfo(torch.float32).tiny


def quantize_rows(x: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """Return ``x`` in the dtype and the scale of each row: ``x`` is about ``quantized * scale``.

    (..., A) -> (..., A), and (...) fp32. The largest value of a row becomes the dtype's largest,
    448 in e4m3. A row with a value that is not finite becomes NaN.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1) / torch.finfo(dtype).max).clamp_(min=_TINY)
    return (wide / scale[..., None]).to(dtype), scale


def restored_rows(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of :func:`quantize_rows` in the dtype."""
    return quantized.float().mul_(scale[..., None]).to(dtype)


def rounded_rows(x: Tensor) -> Tensor:
    """Return ``x`` rounded to e4m3 with a scale per row, in its own dtype; fp64 too."""
    return restored_rows(*quantize_rows(x), x.dtype)
