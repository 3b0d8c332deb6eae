"""Time of a layer's exchanges, and how much of it the experts' computation hides.

With overlap degree d the rows of a layer travel in d chunks (arXiv 2206.03382, section 3.2)::

    link      > D0 > D1 > D2 > D3      > C0 > C1 > C2 > C3
    products        F0   F1   F2   F3

All dispatches are queued at once; a chunk's products start when it is there and the chunk before is
done, its way back when its products are done and the link is free. The backward pass runs the same
way with the gradients, and weight gradients, which no exchange waits for, fill the end. A chunk
costs as an exchange of its size: d chunks send d times the messages and start d times. What travels
in another number format is read and written once more at either end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..config import EXCHANGES, ExchangeConfig
from ..distributed.exchanges import Leg
from ..moe.wire import wire_format
from .flow import make_flow
from .hardware import Hardware
from .memory import dispatch_rows
from .parameters import Parameters
from .settings import Settings
from .work import Work


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of all exchanges of one update.

    Attributes:
        exposed: that the layers wait for the links.
        carried: that the links are busy, hidden or not.
        casts: that rows take into the numbers of the wire, and out of them.
    """

    exposed: float = 0.0
    carried: float = 0.0
    casts: float = 0.0

    @property
    def hidden(self) -> float:
        """Share of the links' time that the layers do not wait for, 0..1."""
        return 1 - self.exposed / self.carried if self.carried else 0.0


def exposed(
    there: float, products: float, back: float, degree: int, meanwhile: float = 0.0
) -> float:
    """Seconds that a layer waits for its two exchanges.

    Args:
        there, back: of one chunk on the link.
        products: of one chunk's experts.
        degree: d, chunks; one hides nothing.
        meanwhile: of work that follows the products and waits for no exchange.
    """
    if degree == 1:
        return there + back
    link, done = degree * there, 0.0
    for chunk in range(1, degree + 1):
        done = max(done, chunk * there) + products
        link = max(link, done) + back
    return max(link, done + meanwhile) - degree * products - meanwhile


def row_bytes(config: ExchangeConfig, leg: Leg, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a row of ``dim`` values of a dtype on a leg."""
    name = wire_format(config, leg, dtype)
    return dim * dtype.itemsize if name is None else ops.wire_bytes(name, dim)


def exchange_time(
    settings: Settings, parameters: Parameters, work: Work, hardware: Hardware
) -> ExchangeTime:
    """Exchanges of one update with the algorithm, degree and wire of the settings."""
    if not work.exchanges:
        return ExchangeTime()
    model, choice, b = settings.model, settings.exchange, settings.precision.element
    rows, dim, degree = dispatch_rows(settings), model.decoder_embed_dim, choice.overlap_degree
    flops = hardware.flops(b) * hardware.matmul_efficiency
    products = rows * 4 * dim * model.moe_expert_ffn_dim / flops / degree
    legs = (Leg.DISPATCH, Leg.COMBINE, Leg.DISPATCH_GRADIENT)
    widths = [row_bytes(choice, leg, dim, _dtype(settings)) for leg in legs]
    sent = rows * make_flow(settings, parameters).copies
    predict = EXCHANGES.get(choice.algorithm).predict
    there, back, gradient = (
        predict(sent * width / degree, work.exchange_peers, hardware) for width in widths
    )
    stream = hardware.memory_bandwidth * hardware.memory_efficiency
    # written and read at both ends
    casts = [2 * sent * (dim * b + w) / stream if w < dim * b else 0.0 for w in widths]
    forward = exposed(there, products, back, degree)
    # of the two products of the backward pass an exchange waits for the rows' gradients only
    backward = exposed(gradient, products, gradient, degree, meanwhile=degree * products)
    layers = parameters.moe_layers * settings.update_freq
    passes = 2 if model.checkpoint_activations else 1  # forward passes, with recomputation
    return ExchangeTime(
        exposed=layers * (passes * forward + backward),
        carried=layers * degree * (passes * (there + back) + 2 * gradient),
        casts=layers * (passes * (casts[0] + casts[1]) + 2 * casts[2]),
    )


def _dtype(settings: Settings) -> torch.dtype:
    return torch.float16 if settings.precision.element == 2 else torch.float32
