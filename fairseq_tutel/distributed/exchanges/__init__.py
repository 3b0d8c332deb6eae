"""Exchange of rows between the ranks of a layer: one algorithm per file, chosen by name.

To add an algorithm, decorate a subclass of :class:`ExchangeAlgorithm` with
``register_exchange("name")``. ``move`` sends the rows, ``partitions`` names the process groups, and
``predict`` estimates the time. :class:`Exchange` adds gradients, wire formats, timing and overlap.
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
