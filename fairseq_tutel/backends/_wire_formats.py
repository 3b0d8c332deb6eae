"""Formats of rows on the wire; both backends write the same bytes.

A row has M encoded values, one scale byte per block of 128 values (none for bf16; the last block
may be shorter), and zeros up to a multiple of 4 bytes. The scale byte is the biased exponent of a
power of two in fp32: the E8M0 of the OCP Microscaling Formats (MX) Specification 1.0. So scaling
rounds nothing. The byte 255 marks a block with a NaN or an infinity; the whole block arrives as
NaN. The scale brings the block's largest magnitude to between 7/8 and 7/4 times 2^exponent, below
the format's largest value: no value up to 3e38 overflows.
"""

from dataclasses import dataclass

import torch

# values that share a scale
BLOCK = 128
# the scale byte of a block that is not finite
NOT_FINITE = 255
# added to the bits of an fp32: carries into its exponent where the mantissa exceeds 1.75
CARRY_ABOVE_7_4 = 0x1FFFFF


@dataclass(frozen=True)
class WireFormat:
    """A format of the values of rows."""

    dtype: torch.dtype
    exponent: int | None  # largest magnitude: 7/4 times 2^exponent, exactly in fp8; None: no scales
    mantissa: int = 0  # of the 8-bit formats: its explicit bits
    bias: int = 0  # of the 8-bit formats: that of the exponent

    def num_bytes(self, model_dim: int) -> int:
        """Return the bytes of a row of M values."""
        values = model_dim * self.dtype.itemsize
        if self.exponent is None:
            return values
        return -(-(values + num_blocks(model_dim)) // 4) * 4


WIRE_FORMATS = {
    "bf16": WireFormat(torch.bfloat16, None),
    "fp16": WireFormat(torch.float16, 15),
    "e4m3": WireFormat(torch.float8_e4m3fn, 8, mantissa=3, bias=7),
    "e5m2": WireFormat(torch.float8_e5m2, 15, mantissa=2, bias=15),
}


def num_blocks(model_dim: int) -> int:
    """Return the number of blocks in a row of M values."""
    return -(-model_dim // BLOCK)
