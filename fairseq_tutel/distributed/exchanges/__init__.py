"""How rows travel between the ranks of a layer: one algorithm per file, chosen by name.

To add one, decorate a subclass of :class:`ExchangeAlgorithm` with ``register_exchange("name")``:
``move`` says how rows travel, ``partitions`` in which process groups, ``predict`` how long.
Gradients, wire formats, times and overlap come with :class:`Exchange`.
"""

from .algorithm import (
    Direction,
    ExchangeAlgorithm,
    LocalCopy,
    NetworkProfile,
    Splits,
    chunk_edges,
    exchange_candidates,
    register_exchange,
)
from .build import build_algorithms, build_exchange
from .exchange import Codec, Exchange, ExchangeRecord, Handle
from .linear import LinearExchange
from .streams import Stream, stream_of
from .two_dimensional import TwoDimensionalExchange
