"""Encoding of rows for the wire: fewer bits per number between ranks.

The functions are not registered with torch: an exchange calls them inside of its autograd
functions. It encodes the gradient that comes back separately (straight-through).
"""

import torch
from torch import Tensor

from ..config import WIRE_FORMATS
from .backend import implementation


def wire_bytes(wire_format: str, model_dim: int) -> int:
    """Return the bytes of one encoded row of M values; ValueError for an unknown format."""
    if wire_format not in WIRE_FORMATS:
        raise ValueError(f"unknown wire format {wire_format!r}; one of {', '.join(WIRE_FORMATS)}")
    return WIRE_FORMATS[wire_format].num_bytes(model_dim)


def encode_rows(rows_RM: Tensor, wire_format: str) -> tuple[Tensor, Tensor]:
    """Encode rows as bytes.

    Args:
        rows_RM: (R, M) fp32, fp16 or bf16; fp64 is rounded to fp32 first.
        wire_format: name of a :class:`~fairseq_tutel.config.formats.WireFormat`. Those with scales
            represent any magnitude up to 3e38. A block with a value that is not finite becomes NaN.

    Returns:
        wire_RD: (R, D) uint8, D from :func:`wire_bytes`.
        square_sums: (2,) fp32, sums of squared errors and of squares over values that arrive
            finite; the root of their ratio is the relative error. The torch backend measures 64 to
            127 rows.
    """
    if rows_RM.dim() != 2 or not rows_RM.is_floating_point():
        raise ValueError(
            f"rows must be (rows, model_dim) of numbers, got {tuple(rows_RM.shape)} {rows_RM.dtype}"
        )
    wire_bytes(wire_format, rows_RM.shape[1])
    return implementation("encode_rows", rows_RM)(rows_RM, wire_format)


def decode_rows(wire_RD: Tensor, wire_format: str, out_RM: Tensor) -> Tensor:
    """Decode the bytes of :func:`encode_rows` into ``out_RM``, and return it.

    It is contiguous, of any floating dtype.
    """
    size = wire_bytes(wire_format, out_RM.shape[1])
    if wire_RD.dtype != torch.uint8 or wire_RD.shape != (out_RM.shape[0], size):
        raise ValueError(
            f"rows {tuple(out_RM.shape)} are ({out_RM.shape[0]}, {size}) uint8 as {wire_format}, "
            f"got {tuple(wire_RD.shape)} {wire_RD.dtype}"
        )
    return implementation("decode_rows", out_RM)(wire_RD, wire_format, out_RM)
