"""Tables of the formats of numbers: on the wire between ranks, and of what experts keep.

Options, operators, both backends and estimates of bytes read them. ``CONTRIBUTING.md`` says how to
add a format.
"""

from __future__ import annotations

from dataclasses import dataclass

# values of a row on the wire that share a scale
BLOCK = 128
# the scale byte of a block that is not finite
NOT_FINITE = 255
# added to the bits of an fp32: carries into its exponent where the mantissa exceeds 1.75
CARRY_ABOVE_7_4 = 0x1FFFFF


@dataclass(frozen=True)
class WireFormat:
    """Format of the values of a row on the wire; both backends write the same bytes.

    A row has M encoded values, one scale byte per block of BLOCK values (none without an exponent;
    the last block may be shorter), and zeros up to a multiple of 4 bytes. The scale byte is the
    biased exponent of a power of two in fp32: the E8M0 of the OCP Microscaling Formats (MX)
    Specification 1.0. So scaling rounds nothing. The byte 255 marks a block with a NaN or an
    infinity; the whole block arrives as NaN. The scale brings the block's largest magnitude to
    between 7/8 and 7/4 times 2^exponent, below the format's largest value: no value up to 3e38
    overflows.
    """

    name: str  # in the operators
    dtype: str  # torch's name
    value_bytes: int
    exponent: int | None = None  # largest magnitude: 7/4 times 2^exponent; None: no scales
    mantissa: int = 0  # of the 8-bit formats: its explicit bits
    bias: int = 0  # of the 8-bit formats: that of the exponent

    def num_bytes(self, model_dim: int) -> int:
        """Return the bytes of a row of M values."""
        values = model_dim * self.value_bytes
        if self.exponent is None:
            return values
        return -(-(values + num_blocks(model_dim)) // 4) * 4


@dataclass(frozen=True)
class Wire:
    """A choice of the options ``wire``, ``wire_back`` and ``wire_grad``."""

    help: str
    rows: WireFormat
    gradients: WireFormat
    auto: str  # choice for outputs and gradients if only tokens have this one


_BF16 = WireFormat("bf16", "bfloat16", 2)
_FP16 = WireFormat("fp16", "float16", 2, exponent=15)
_E4M3 = WireFormat("e4m3", "float8_e4m3fn", 1, exponent=8, mantissa=3, bias=7)
_E5M2 = WireFormat("e5m2", "float8_e5m2", 1, exponent=15, mantissa=2, bias=15)

# beside "same", which encodes nothing
WIRES = {
    "bf16": Wire("rounded", _BF16, _BF16, "bf16"),
    "fp16": Wire(f"with a scale per {BLOCK} values", _FP16, _FP16, "fp16"),
    "fp8": Wire("e4m3, gradients e5m2, with such scales", _E4M3, _E5M2, "bf16"),
}
WIRE_FORMATS = {each.name: each for wire in WIRES.values() for each in (wire.rows, wire.gradients)}


def num_blocks(model_dim: int) -> int:
    """Return the number of blocks in a row of M values."""
    return -(-model_dim // BLOCK)


@dataclass(frozen=True)
class StoredFormat:
    """Format in which experts keep the values before the activation for the backward pass."""

    help: str
    dtype: str | None = None  # torch's name; None: the dtype of the rows
    scaled: bool = False  # a scale in fp32 per row brings its largest value to the dtype's largest


STORED_FORMATS = {
    "same": StoredFormat("that of the rows"),
    "fp8": StoredFormat("e4m3, a scale per row", "float8_e4m3fn", scaled=True),
}


def listed(formats: dict) -> str:
    """Return the choices and their effects, for a help text."""
    return "; ".join(f"'{name}': {each.help}" for name, each in formats.items())
