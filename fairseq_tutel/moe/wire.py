"""Wire formats: encode rows in fewer bits while they travel between ranks.

Gradients pass straight through the rounding of rows, and are rounded themselves when they travel.
"""

import torch

from .. import ops
from ..config import WIRES, ExchangeConfig
from ..distributed import Direction


class WireCodec:
    """Codec (:class:`~fairseq_tutel.distributed.exchanges.Codec`) with the formats of a config."""

    def __init__(self, config: ExchangeConfig):
        self._config = config

    def encode(self, rows, direction):
        name = wire_format(self._config, direction, rows.dtype)
        return None if name is None else ops.encode_rows(rows.flatten(1), name)

    def decode(self, message, direction, out):
        if name := wire_format(self._config, direction, out.dtype):
            ops.decode_rows(message, name, out.flatten(1))


def wire_format(config: ExchangeConfig, direction: Direction, dtype: torch.dtype) -> str | None:
    """Return the operators' name for a direction's format; None if rows travel as they are."""
    gradient = direction in (Direction.DISPATCH_GRADIENT, Direction.COMBINE_GRADIENT)
    name = config.wire_of(back=direction is Direction.COMBINE, gradient=gradient)
    if name == "same":
        return None
    chosen = WIRES[name].gradients if gradient else WIRES[name].rows
    return chosen.name if chosen.value_bytes < dtype.itemsize else None


def row_bytes(
    config: ExchangeConfig,
    model_dim: int,
    dtype: torch.dtype,
    direction: Direction = Direction.DISPATCH,
) -> int:
    """Return the bytes of a token's row while it travels, by default to an expert."""
    name = wire_format(config, direction, dtype)
    return model_dim * dtype.itemsize if name is None else ops.wire_bytes(name, model_dim)
