"""Encoding of rows for the wire in plain torch; ``config/formats.py`` has the formats."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...config.formats import (
    BLOCK,
    CARRY_ABOVE_7_4,
    NOT_FINITE,
    WIRE_FORMATS,
    WireFormat,
    num_blocks,
)

_INFINITY_BITS = 0x7F800000
# Values per chunk: its temporaries stay in a core's cache.
_CHUNK = 1 << 17
# The error is measured on this many evenly spread rows, if there are more than twice as many.
_MEASURED_ROWS = 64


def encode_rows(rows_RM: Tensor, wire_format: str) -> tuple[Tensor, Tensor]:
    """Return rows as bytes, and square sums, as :func:`fairseq_tutel.ops.encode_rows` does."""
    num_rows, model_dim = rows_RM.shape
    chosen = WIRE_FORMATS[wire_format]
    wire_RD = rows_RM.new_empty((num_rows, chosen.num_bytes(model_dim)), dtype=torch.uint8)
    if wire_RD.numel() == 0:
        return wire_RD, rows_RM.new_zeros(2, dtype=torch.float32)
    if chosen.exponent is None:
        wire_RD.view(_dtype(chosen)).copy_(rows_RM)
    else:
        step = max(1, _CHUNK // model_dim)
        for rows, wire in zip(rows_RM.split(step), wire_RD.split(step), strict=True):
            _encode_scaled(rows, wire, chosen)
    step = max(1, num_rows // _MEASURED_ROWS)
    return wire_RD, _square_sums(rows_RM[::step], wire_RD[::step], wire_format)


def decode_rows(wire_RD: Tensor, wire_format: str, out_RM: Tensor) -> Tensor:
    """Write rows from bytes to ``out_RM``, as :func:`fairseq_tutel.ops.decode_rows` does."""
    chosen = WIRE_FORMATS[wire_format]
    if out_RM.numel() == 0:
        return out_RM
    if chosen.exponent is None:
        return out_RM.copy_(wire_RD.contiguous().view(_dtype(chosen)))
    step = max(1, _CHUNK // out_RM.shape[1])
    for rows, wire in zip(out_RM.split(step), wire_RD.split(step), strict=True):
        _decode_scaled(wire, rows, chosen)
    return out_RM


def _dtype(chosen: WireFormat) -> torch.dtype:
    return getattr(torch, chosen.dtype)


def _encode_scaled(rows, wire, chosen: WireFormat):
    """Fill the bytes of some rows."""
    blocks_RBN = _blocks(rows.float())
    largest_RB = torch.maximum(blocks_RBN.amax(2), -blocks_RBN.amin(2))  # NaN where there is one
    bits_RB = largest_RB.view(torch.int32) & 0x7FFFFFFF
    finite_RB = bits_RB < _INFINITY_BITS
    byte_RB = ((bits_RB + CARRY_ABOVE_7_4) >> 23).sub_(chosen.exponent).clamp_(min=1)
    # times 0 if not finite, so that every number fits the format
    inverse_RB = ((254 - byte_RB) << 23).mul_(finite_RB).view(torch.float32)
    values = (blocks_RBN * inverse_RB[..., None]).flatten(1)[:, : rows.shape[1]].to(_dtype(chosen))
    num_bytes, scales = values.shape[1] * chosen.value_bytes, byte_RB.shape[1]
    wire[:, :num_bytes] = values.contiguous().view(torch.uint8)
    wire[:, num_bytes : num_bytes + scales] = byte_RB.masked_fill_(~finite_RB, NOT_FINITE)
    wire[:, num_bytes + scales :] = 0


def _decode_scaled(wire, rows, chosen: WireFormat):
    """Fill some rows from their bytes."""
    model_dim = rows.shape[1]
    num_bytes, scales = model_dim * chosen.value_bytes, num_blocks(model_dim)
    byte_RB = wire[:, num_bytes : num_bytes + scales].to(torch.int32)
    # 255 becomes a NaN, which stays one in every product
    bits_RB = (byte_RB << 23) | ((byte_RB == NOT_FINITE).to(torch.int32) << 22)
    blocks_RBN = _blocks(_as_float32(wire[:, :num_bytes].contiguous(), chosen))
    blocks_RBN.mul_(bits_RB.view(torch.float32)[..., None])
    decoded = blocks_RBN.flatten(1)[:, :model_dim]
    if rows.dtype == torch.float16:  # its largest numbers may have been rounded up
        limit = torch.finfo(torch.float16).max
        decoded = decoded.clamp(-limit, limit)
    rows.copy_(decoded)


def _as_float32(values, chosen: WireFormat):
    """Return encoded values in fp32, without their scales.

    The bits of an e4m3, also of a subnormal one, shifted into an fp16 are 2^-8 times its value.
    This is three times faster than torch's conversion.
    """
    if _dtype(chosen) != torch.float8_e4m3fn:
        return values.view(_dtype(chosen)).float()
    wide = values.view(torch.int8).to(torch.int16)
    return (((wide << 7) & 0x3F80) | (wide & -0x8000)).view(torch.float16).float().mul_(2.0**8)


def _blocks(rows_RM):
    """View rows as [R, B, BLOCK]; the last block is filled up with zeros."""
    num_rows, model_dim = rows_RM.shape
    missing = num_blocks(model_dim) * BLOCK - model_dim
    padded = pad(rows_RM, (0, missing)) if missing else rows_RM
    return padded.reshape(num_rows, num_blocks(model_dim), BLOCK)


def _square_sums(rows_RM, wire_RD, wire_format):
    """Return the sums of squared errors and of squares over finite results, [2] fp32."""
    rows_RM = rows_RM.float()
    arrived = decode_rows(wire_RD, wire_format, rows_RM.new_empty(rows_RM.shape))
    finite = arrived.isfinite()
    value = rows_RM.masked_fill(~finite, 0)
    error = arrived.masked_fill_(~finite, 0).sub_(value)
    return torch.stack([error.square_().sum(), value.square_().sum()])
