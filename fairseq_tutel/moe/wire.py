"""What travels between ranks in fewer bits than it has: formats by leg, and how much they lose.

Rows are encoded as they leave and decoded as they arrive, whatever the algorithm of the exchange
does between; gradients pass straight through the rounding and are rounded on their own way.
"""

from __future__ import annotations

import torch

from .. import ops
from ..config import ExchangeConfig
from ..distributed import Codec, Exchange, Leg, Wrapper


class WireErrors:
    """Sums of squared errors and squares by leg, kept on the device until somebody takes them."""

    def __init__(self):
        self._sums: dict[Leg, torch.Tensor] = {}

    def add(self, leg: Leg, square_sums: torch.Tensor) -> None:
        """Add the sums [2] of a message."""
        before = self._sums.get(leg)
        self._sums[leg] = square_sums if before is None else before + square_sums

    def take(self, device: torch.device, *, gradients: bool) -> torch.Tensor:
        """fp32 [4, 2] of all legs since they were last taken, zero for those without.

        Args:
            device: of the rows.
            gradients: also take those of the gradients; else they stay.
        """
        legs = [leg for leg in Leg if gradients or leg in (Leg.DISPATCH, Leg.COMBINE)]
        taken = {leg: self._sums.pop(leg) for leg in legs if leg in self._sums}
        none = torch.zeros(2, device=device)
        return torch.stack([taken.get(leg, none) for leg in Leg])


class WireExchange(Wrapper):
    """An exchange whose rows travel in the formats of its legs.

    Attributes:
        errors: of what it encoded.
    """

    def __init__(self, inner: Exchange, config: ExchangeConfig, errors: WireErrors | None = None):
        super().__init__(inner)
        self.config = config
        self.errors = errors or WireErrors()

    def codec(self, leg, dtype):
        """The format of the leg where it is narrower than the dtype."""
        name = wire_format(self.config, leg, dtype)
        return None if name is None else _RowCodec(name, leg, self.errors)

    def for_message(self, num_bytes):
        """This wrapper around what the inner exchange chooses."""
        chosen = self.inner.for_message(num_bytes)
        return self if chosen is self.inner else WireExchange(chosen, self.config, self.errors)


class _RowCodec(Codec):
    """One format on one leg."""

    def __init__(self, name: str, leg: Leg, errors: WireErrors):
        self._name, self._leg, self._errors = name, leg, errors

    def encode(self, rows):
        message, square_sums = ops.encode_rows(rows.flatten(1), self._name)
        self._errors.add(self._leg, square_sums)
        return message

    def decode(self, message, out):
        ops.decode_rows(message, self._name, out.flatten(1))


def wire_format(config: ExchangeConfig, leg: Leg, dtype: torch.dtype) -> str | None:
    """Name of the operators' format of a leg; None where rows travel as they are."""
    gradient = leg in (Leg.DISPATCH_GRADIENT, Leg.COMBINE_GRADIENT)
    name = config.wire_of(back=leg is Leg.COMBINE, gradient=gradient)
    if name == "same" or dtype.itemsize <= (1 if name == "fp8" else 2):
        return None
    if name == "fp8":
        return "e5m2" if gradient else "e4m3"
    return name


def row_bytes(config: ExchangeConfig, model_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a token on its way to an expert."""
    name = wire_format(config, Leg.DISPATCH, dtype)
    return model_dim * dtype.itemsize if name is None else ops.wire_bytes(name, model_dim)


def with_wire(
    exchange: Exchange, config: ExchangeConfig, errors: WireErrors | None = None
) -> Exchange:
    """The exchange itself where nothing leaves its rank or nothing is to be compressed."""
    if exchange.groups.ep_size == 1 or not config.compresses:
        return exchange
    return WireExchange(exchange, config, errors)
